"""What a plan does with blocks before its slices run: resizes, table edits, copies, zeroing. All ids are checked."""

from collections.abc import Iterable, Mapping

from protos.cidery.worker.v1 import worker_pb2 as pb
from worker.errors import ProtocolError
from worker.kv_shapes import LayerShape, ReachKind
from worker.kv_tensors import KVTensors
from worker.sequences import SequenceState


class PlanBlocks:
    """Carries a plan's block operations out, on the pools and on the block tables of live sequences."""

    def __init__(self, tensors: KVTensors, sequences: Mapping[int, SequenceState]) -> None:
        self._tensors = tensors
        self._sequences = sequences
        # Windows and chunks leave blocks behind, and null ones in their place.
        self._may_be_null = [
            all(
                isinstance(shape, LayerShape) and shape.reach.kind is not ReachKind.FULL
                for shape in (tensors.caches[cache] for cache in group.caches)
            )
            for group in tensors.groups
        ]

    def resize(self, resizes: Iterable[pb.PoolResize]) -> None:
        """Move blocks between pools' ends; block tables follow."""
        for resize in resizes:
            if resize.pool >= len(self._tensors.num_blocks):
                raise ProtocolError(f"resize of pool {resize.pool}, of {len(self._tensors.num_blocks)}")
            if resize.num_blocks < 1:
                raise ProtocolError(f"resize of pool {resize.pool} to {resize.num_blocks} blocks; at least 1 is needed")
            num_blocks = self._tensors.num_blocks[resize.pool]
            moves = [(move.source, move.target) for move in resize.moves]
            for source, target in moves:
                if not (resize.num_blocks <= source < num_blocks and 0 < target < resize.num_blocks):
                    raise ProtocolError(
                        f"resize of pool {resize.pool} from {num_blocks} to {resize.num_blocks} blocks moves block "
                        f"{source} to {target}"
                    )
            self._tensors.settle_states()
            self._tensors.resize(resize.pool, resize.num_blocks, moves)
            groups = [number for number, group in enumerate(self._tensors.groups) if group.pool == resize.pool]
            for sequence in self._sequences.values():
                sequence.rename_blocks(groups, dict(moves))

    def edit(self, edits: Iterable[pb.TableEdit]) -> None:
        """Go over to other blocks of the same content."""
        for edit in edits:
            sequence = self._sequences.get(edit.seq_id)
            if sequence is None:
                raise ProtocolError(f"block table edit of sequence {edit.seq_id}, which is unknown")
            self.check_ids(edit.group, (edit.block_id,), f"sequence {edit.seq_id}")
            sequence.replace_block(edit.group, edit.index, edit.block_id)

    def move(self, copies: Iterable[pb.BlockCopy], zeroes: Iterable[pb.GroupBlocks]) -> None:
        """Copy, all sources first, and then zero."""
        by_group: dict[int, tuple[list[int], list[int]]] = {}
        for copy in copies:
            self.check_ids(copy.group, (copy.source, copy.target), "block copy")
            sources, targets = by_group.setdefault(copy.group, ([], []))
            sources.append(copy.source)
            targets.append(copy.target)
        zeroes = [blocks for blocks in zeroes if blocks.block_ids]
        if by_group or zeroes:
            self._tensors.settle_states()
        # Groups that share a pool have no block in common, so each may be copied by itself.
        for group, (sources, targets) in by_group.items():
            self._tensors.copy_blocks(group, sources, targets)
        for blocks in zeroes:
            self.check_ids(blocks.group, blocks.block_ids, "zeroing")
            self._tensors.fill_blocks(blocks.group, blocks.block_ids)

    def check_tables(self, tables: Iterable[pb.GroupBlocks], what: str) -> None:
        """Raises ProtocolError for a block that cannot be."""
        for blocks in tables:
            self.check_ids(blocks.group, blocks.block_ids, what, is_table=True)

    def check_ids(self, group: int, block_ids: Iterable[int], what: str, *, is_table: bool = False) -> None:
        """Raises ProtocolError for a group or a block that cannot be; commits the memory of ids never used before."""
        groups = self._tensors.groups
        if group >= len(groups):
            raise ProtocolError(f"{what}: group {group} does not exist; the model has {len(groups)}")
        num_blocks = self._tensors.num_blocks[groups[group].pool]
        lowest = 0 if is_table and self._may_be_null[group] else 1
        highest = 0
        for block_id in block_ids:
            if not lowest <= block_id < num_blocks:
                raise ProtocolError(f"{what}: block id {block_id} is not in [{lowest}, {num_blocks})")
            highest = max(highest, block_id)
        self._tensors.reserve(group, highest)
