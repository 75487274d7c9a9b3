"""Cuts the byte budget into blocks: which layers share a block table, and how many blocks there are.

`KVLayout.num_blocks_for` is the one place that says what a sequence needs; start-up sizing and admission both ask it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.kv.spec import FullAttentionSpec

NULL_BLOCK = 0


class KVBudgetTooSmall(ValueError):
    """Not even one sequence of max_model_len tokens fits."""


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers that share one block table: block id b of the group is block b in each of them."""

    group_id: int
    layer_indices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class KVLayout:
    """How the KV memory of one model is cut; `num_blocks` counts the null block, which holds no sequence's data."""

    block_size: int
    groups: tuple[KVGroup, ...]
    num_blocks: int
    block_bytes: int
    max_model_len: int

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks of one group that a sequence of `num_tokens` tokens holds when it has grown to that length.

        The newest token has been sampled but not run, so its KV is not there yet.
        """
        return -(-(num_tokens - 1) // self.block_size)

    @property
    def num_usable_blocks(self) -> int:
        """Blocks that sequences can hold."""
        return self.num_blocks - 1

    @property
    def token_capacity(self) -> int:
        """Tokens whose KV fits at once."""
        return self.num_usable_blocks * self.block_size

    @property
    def max_concurrency(self) -> float:
        """Sequences of max_model_len tokens that fit at once."""
        return self.num_usable_blocks / (self.num_blocks_for(self.max_model_len) * len(self.groups))


def plan_layout(
    specs: Sequence[FullAttentionSpec], *, kv_budget_bytes: int, max_model_len: int, block_size: int = 16
) -> KVLayout:
    """The layout for a model whose i-th KV cache is `specs[i]`.

    Full-attention layers of different widths still share one group: a block is the same span of tokens in all of them.
    Raises ValueError for no layers or sizes out of range, KVBudgetTooSmall if one longest sequence does not fit.
    """
    if not specs:
        raise ValueError("a model needs at least one layer with a KV cache, got none")
    if block_size < 1:
        raise ValueError(f"block_size must be at least 1, got {block_size}")
    if max_model_len < 2:
        raise ValueError(f"max_model_len must be at least 2 (a prompt token and one to answer), got {max_model_len}")
    block_bytes = block_size * sum(spec.token_bytes for spec in specs)
    layout = KVLayout(
        block_size=block_size,
        groups=(KVGroup(group_id=0, layer_indices=tuple(range(len(specs)))),),
        num_blocks=kv_budget_bytes // block_bytes,
        block_bytes=block_bytes,
        max_model_len=max_model_len,
    )
    needed = 1 + layout.num_blocks_for(max_model_len)
    if layout.num_blocks < needed:
        raise KVBudgetTooSmall(
            f"one sequence of {max_model_len} tokens needs {needed} blocks of {block_bytes} bytes (one is the null "
            f"block) = {needed * block_bytes} bytes of KV cache, got {kv_budget_bytes} bytes = "
            f"{max(0, layout.num_blocks)} blocks; lower max_model_len or raise the budget"
        )
    return layout
