"""What a decode step attends to, and how it is cut into work for the GPU. Made once a step, shared by alike layers."""

from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from numpy.typing import ArrayLike, NDArray

# Partitions are multiples of this; MLX goes down to 16 tokens. Longer ones than the longest make the last ones of a
# launch run alone. Neither is measured on a GPU by us.
_STEP_TOKENS = 32
_MAX_PARTITION_TOKENS = 1024
# Simdgroups that keep a large GPU busy.
_WANTED_SIMDGROUPS = 1024
# Below this many elements an input sits in another address space, which would be one more kernel to compile.
_MIN_INPUT_ELEMENTS = 8
_MAX_WINDOW_HEAD_DIM = 256


@dataclass(frozen=True, slots=True)
class Cut:
    """How the work of a kind of layer is best cut: simdgroups that one partition keeps busy, and its least length."""

    simdgroups: int = 1
    min_tokens: int = _STEP_TOKENS


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """Which tokens each query row sees, and the work items: partitions that hold any of them.

    Rows come by sequence, `rows_per_sequence` each. Arrays for the kernels, of 8 elements at least: `block_tables
    [num_sequences, max_blocks]`, `ranges [num_rows, 2]` (first token and one past the last), `items [num_items, 2]`
    (sequence, partition), `item_starts [num_sequences + 1]`, all int32.
    """

    num_rows: int
    rows_per_sequence: int
    num_items: int
    partition_tokens: int
    block_tables: mx.array
    ranges: mx.array
    items: mx.array
    item_starts: mx.array

    @property
    def num_sequences(self) -> int:
        """Rows of `block_tables` that are in use."""
        return self.num_rows // self.rows_per_sequence


_ANY_CUT = Cut()


def seen_ranges(context_lens: ArrayLike, *, window: int = 0, chunk: int = 0) -> NDArray[np.int32]:
    """`[num_rows, 2]`: first token that each row sees and its context length, which counts the row itself.

    `window`: a row sees as many tokens at most, itself included. `chunk`: it sees only its own chunk of as many, as in
    chunked local attention. 0 is none.
    """
    lens = np.asarray(context_lens, np.int32)
    begins = np.zeros_like(lens)
    if window:
        begins = np.maximum(begins, lens - window)
    if chunk:
        begins = np.maximum(begins, (lens - 1) // chunk * chunk)
    return np.stack([begins, lens], axis=1)


def plan_decode(
    block_tables: NDArray[np.int32],
    ranges: NDArray[np.int32],
    num_kv_heads: int,
    *,
    rows_per_sequence: int = 1,
    cut: Cut = _ANY_CUT,
) -> DecodePlan:
    """Cut the work of a step. Shapes: `block_tables [num_sequences, max_blocks]`, `ranges` as of `seen_ranges`.

    The partition's length depends on the rows alone, not on `rows_per_sequence`: so do the bits of the result. Only
    table entries within the ranges are ever read. `cut` is that of `paged_decode.cut_for`. Raises ValueError for shapes
    that do not fit. O(rows + items).
    """
    num_rows = len(ranges)
    if len(block_tables) * rows_per_sequence != num_rows or not num_rows:
        raise ValueError(
            f"{num_rows} ranges for {len(block_tables)} block tables of {rows_per_sequence} rows: one a row is needed"
        )
    tokens = int((ranges[:, 1].astype(np.int64) - ranges[:, 0]).sum()) * num_kv_heads
    wanted_items = max(_WANTED_SIMDGROUPS // cut.simdgroups, 1)
    steps = -(-max(-(-tokens // wanted_items), cut.min_tokens) // _STEP_TOKENS)
    partition = min(steps * _STEP_TOKENS, _MAX_PARTITION_TOKENS)
    grouped = ranges.reshape(-1, rows_per_sequence, 2)
    begins, ends = grouped[:, :, 0].min(axis=1), grouped[:, :, 1].max(axis=1)
    firsts = begins // partition
    counts = np.maximum(-(-ends // partition) - firsts, 0)
    starts = np.concatenate([[0], np.cumsum(counts)])
    sequences = np.repeat(np.arange(len(counts)), counts)
    numbers = np.arange(starts[-1]) - starts[sequences] + firsts[sequences]
    return DecodePlan(
        num_rows=num_rows,
        rows_per_sequence=rows_per_sequence,
        num_items=int(starts[-1]),
        partition_tokens=partition,
        block_tables=_padded(block_tables, axis=1),
        ranges=_padded(ranges, axis=0),
        items=_padded(np.stack([sequences, numbers], axis=1), axis=0),
        item_starts=_padded(starts, axis=0),
    )


def plan_verify(
    block_tables: NDArray[np.int32],
    ranges: NDArray[np.int32],
    num_kv_heads: int,
    *,
    rows_per_sequence: int,
    shares_loads: bool,
    cut: Cut = _ANY_CUT,
) -> DecodePlan:
    """The plan of a speculative verify step: each sequence has `rows_per_sequence` rows, whose KV is written already.

    `shares_loads`: they share each load of K and V; else each is a row with a block table of its own. Same bits.
    """
    if not shares_loads:
        block_tables, rows_per_sequence = np.repeat(block_tables, rows_per_sequence, axis=0), 1
    return plan_decode(
        block_tables,
        ranges,
        num_kv_heads,
        rows_per_sequence=rows_per_sequence,
        cut=cut,
    )


def may_share_loads(head_dim: int, *, is_latent: bool = False, has_recurrent_layers: bool = False) -> bool:
    """Whether a model gains where rows of a verify step share loads.

    Never for MLA, for models with recurrent layers, and for heads above 256.
    """
    return head_dim <= _MAX_WINDOW_HEAD_DIM and not is_latent and not has_recurrent_layers


def _padded(array: NDArray[np.int32], axis: int) -> mx.array:
    missing = -(-_MIN_INPUT_ELEMENTS // max(array.size // max(array.shape[axis], 1), 1)) - array.shape[axis]
    if missing > 0:
        widths = [(0, missing if i == axis else 0) for i in range(array.ndim)]
        array = np.pad(array, widths)
    return mx.array(array.astype(np.int32))
