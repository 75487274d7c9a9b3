"""Which Macs can serve one model together: blocks must mean the same on all of them."""

from collections.abc import Sequence

from cluster.kv.layout import KVGroup
from cluster.routing.errors import IncompatibleMac
from cluster.routing.mac import MacInfo, kind_of
from cluster.routing.model_fleet import ModelFleet


def fits(fleet: ModelFleet, info: MacInfo) -> bool:
    """Whether the Mac's blocks are of the fleet's kind."""
    return (fleet.block_size, fleet.root_hash, _cut(fleet.groups)) == (
        info.block_size,
        info.root_hash,
        _cut(info.groups),
    )


def refuse_incompatible(fleet: ModelFleet, info: MacInfo) -> None:
    """Raises IncompatibleMac. Lost Macs don't count: a fleet that comes back with another KV format must be able to."""
    for name, other in fleet.members.items():
        if name == info.name or other.is_lost:
            continue
        if other.info.block_size != info.block_size:
            sizes = f"{info.block_size} tokens here, {other.info.block_size} on {name}"
            raise IncompatibleMac(info.name, f"model {info.model!r} runs with another block size: {sizes}")
        if other.info.root_hash != info.root_hash:
            roots = f"{info.root_hash.hex()} here, {other.info.root_hash.hex()} on {name}"
            differs = "weights, tokenizer or KV format differ"
            raise IncompatibleMac(info.name, f"model {info.model!r} has another root hash ({differs}): {roots}")
        if _cut(other.info.groups) != _cut(info.groups):
            cuts = f"{_names(info.groups)} here, {_names(other.info.groups)} on {name}"
            raise IncompatibleMac(info.name, f"model {info.model!r} has its KV layers in other groups: {cuts}")


def _cut(groups: Sequence[KVGroup]) -> tuple[object, ...]:
    """Not the pools, which follow each Mac's memory."""
    return tuple((group.group_id, group.spec, group.layer_indices) for group in groups)


def _names(groups: Sequence[KVGroup]) -> str:
    return " + ".join(kind_of(group) for group in groups)
