"""What the worker knows of a sequence between steps: tokens, block tables, hash chain, sampling, whether it ended."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from cluster.kv.hashing import HASH_BYTES, BlockHash, first_extras, hash_block, split_hashes
from protos.cidery.v1.sampling_pb2 import SamplingParams
from protos.cidery.worker.v1.worker_pb2 import GroupBlocks, NewSequence, Slice
from worker.batch import Span
from worker.drafting import Drafting
from worker.errors import ProtocolError
from worker.models import SamplingDefaults
from worker.reading import make_reading
from worker.row_rules import RowRules
from worker.sampler import MAX_TOP_LOGPROBS, RowSampling


@dataclass(frozen=True, slots=True)
class TableLayout:
    """What the block tables of a sequence are like. `main_group` is the first that keeps all tokens; None if none."""

    block_size: int
    is_state: tuple[bool, ...]
    main_group: int | None


class SequenceState:
    """One sequence. Raises ProtocolError for whatever worker.proto does not allow."""

    def __init__(
        self, message: NewSequence, *, layout: TableLayout, root: BlockHash, defaults: SamplingDefaults
    ) -> None:
        self.seq_id: int = message.seq_id
        self.token_ids: list[int] = list(message.token_ids)
        self.block_tables: list[list[int]] = [[] for _ in layout.is_state]
        self.has_ended = False
        # A step that has not ended will draw its next token.
        self.awaits_token = False
        self._layout = layout
        self._block_size = layout.block_size
        self._root = root
        self.adapter: str = message.adapter
        self._extras = first_extras(message.cache_salt, message.adapter)
        self._hashes = self._known_hashes(message.block_hashes)
        self._stop_token_ids = frozenset(message.stop_token_ids)
        if not self.token_ids:
            raise ProtocolError(f"sequence {self.seq_id} has no tokens; at least 1 is needed")
        self.sampling = row_sampling(self.seq_id, message.sampling, defaults, message.stop_token_ids)
        self.rules: RowRules | None = None
        self.drafting: Drafting | None = None
        # Tokens that have run, whose states are in their slots; None before the first slice.
        self.num_run: int | None = None
        # Tokens whose keys and values are there: all that ran but wrong drafts.
        self.num_certain = 0
        self.reading = make_reading(message)
        self.append_blocks(message.block_tables)

    @property
    def failure(self) -> str:
        """Why no token can be drawn; empty as long as one can."""
        if self.reading is not None and self.reading.failure:
            return self.reading.failure
        return self.rules.failure if self.rules is not None else ""

    def append_blocks(self, groups: Iterable[GroupBlocks]) -> None:
        """Lengthen block tables."""
        for blocks in groups:
            self.block_tables[blocks.group].extend(blocks.block_ids)

    def replace_block(self, group: int, index: int, block_id: int) -> None:
        """Go over to another block of the same content."""
        table = self.block_tables[group]
        if index >= len(table):
            raise ProtocolError(
                f"sequence {self.seq_id}: edit of block {index} but the block table of group {group} has {len(table)}"
            )
        table[index] = block_id

    def rename_blocks(self, groups: Iterable[int], moves: Mapping[int, int]) -> None:
        """Blocks of these groups have moved."""
        for group in groups:
            table = self.block_tables[group]
            table[:] = [moves.get(block_id, block_id) for block_id in table]

    def append_token(self, token_id: int) -> bool:
        """Take a drawn token; True if it ends the sequence."""
        self.token_ids.append(token_id)
        self.has_ended = token_id in self._stop_token_ids
        if self.rules is not None and not self.has_ended:
            self.rules.take(token_id)
        return self.has_ended

    def is_open(self, piece: Slice) -> bool:
        """Whether the slice runs from wherever the sequence is, as one that may have drafts does."""
        return self.drafting is not None and piece.samples and piece.num_tokens == 1 and self.num_run is not None

    def span(self, piece: Slice, drafts: Sequence[int] = ()) -> Span:
        """The slice's tokens with `drafts` behind them, and the blocks under them."""
        start, known = piece.start, len(self.token_ids) + self.awaits_token
        end = start + piece.num_tokens
        if self.is_open(piece):
            if start < known - 1:
                raise self._bad_slice(start, end, f"is before the last of the {known} known tokens")
            assert self.num_run is not None
            start, end = self.num_run, known
        elif piece.max_drafts:
            raise self._bad_slice(start, end, "allows drafts where there can be none")
        if end == start:
            raise self._bad_slice(start, end, "is empty; at least 1 token is needed")
        if end > known:
            raise self._bad_slice(start, end, f"reaches beyond the {known} known tokens")
        if piece.samples and end != known:
            raise self._bad_slice(start, end, f"samples but does not end with the last of the {known} known tokens")
        end += len(drafts)
        for group, (is_state, table) in enumerate(zip(self._layout.is_state, self.block_tables, strict=True)):
            needed = 1 if is_state else -(-end // self._block_size)
            if needed > len(table):
                problem = f"needs {needed} blocks but the block table of group {group} has {len(table)}"
                raise self._bad_slice(start, end, problem)
        main = self._layout.main_group
        table = [] if main is None else self.block_tables[main]
        is_late = self.awaits_token and end == known
        token_ids = [*self.token_ids[start:end], *drafts, *[0] * is_late]
        if self.reading is None:
            return Span(
                token_ids,
                start,
                table,
                piece.samples,
                self.block_tables,
                adapter=self.adapter,
                num_drafts=len(drafts),
                is_late=is_late,
            )
        scored = self.reading.scored_positions(start, end)
        if scored and scored.stop != end + 1 - piece.samples:
            raise self._bad_slice(start, end, f"is scored up to position {scored.stop - 1}, not to its end")
        return Span(
            token_ids,
            start,
            table,
            piece.samples and not self.reading.reads_only,
            self.block_tables,
            self.reading,
            # The last row of a prompt predicts no token of it, but lies behind those that do.
            len(scored) + piece.samples if scored else 0,
            self.adapter,
            len(drafts),
            is_late,
        )

    def ran(self, span: Span, num_accepted: int = 0) -> bool:
        """The span has run, and so many of its drafts came true; False if that leaves the states behind.

        A state that has seen a wrong draft is put back to where it was before the span, and the next span begins there.
        """
        self.num_certain = span.end - span.num_drafts + num_accepted
        is_whole = num_accepted == span.num_drafts
        keeps_states = is_whole or not any(self._layout.is_state)
        if keeps_states:
            self.num_run = self.num_certain
        return keeps_states

    def _bad_slice(self, start: int, end: int, problem: str) -> ProtocolError:
        return ProtocolError(f"sequence {self.seq_id}: slice [{start}, {end}) {problem}")

    def filled_blocks(self, start: int, end: int) -> list[tuple[int, BlockHash]]:
        """Index and hash of the blocks whose last slot lies in positions `[start, end)`."""
        size = self._block_size
        return [(index, self._hash(index)) for index in range(start // size, end // size)]

    def _hash(self, index: int) -> BlockHash:
        size = self._block_size
        while len(self._hashes) <= index:
            at = len(self._hashes) * size
            parent = self._hashes[-1] if self._hashes else self._root
            extras = self._extras.get(len(self._hashes), ())
            self._hashes.append(hash_block(parent, self.token_ids[at : at + size], extras))
        return self._hashes[index]

    def _known_hashes(self, joined: bytes) -> list[BlockHash]:
        most = len(self.token_ids) // self._block_size
        if len(joined) % HASH_BYTES or len(joined) // HASH_BYTES > most:
            allowed = f"a multiple of {HASH_BYTES}, up to {most * HASH_BYTES}"
            raise ProtocolError(f"sequence {self.seq_id}: {len(joined)} bytes of block hashes; allowed is {allowed}")
        return split_hashes(joined)


def row_sampling(
    seq_id: int, params: SamplingParams, defaults: SamplingDefaults, stop_token_ids: Iterable[int] = ()
) -> RowSampling:
    """Parameters of one row, the model's defaults where the request is silent. Raises ProtocolError if out of range."""
    row = RowSampling(
        temperature=params.temperature if params.HasField("temperature") else defaults.temperature,
        top_k=params.top_k if params.HasField("top_k") else defaults.top_k,
        top_p=params.top_p if params.HasField("top_p") else defaults.top_p,
        min_p=params.min_p if params.HasField("min_p") else defaults.min_p,
        seed=params.seed,
        num_top_logprobs=params.num_top_logprobs if params.HasField("num_top_logprobs") else None,
        xtc_probability=params.xtc_probability,
        xtc_threshold=params.xtc_threshold,
        xtc_exempt=tuple(sorted(set(stop_token_ids))) if params.xtc_probability else (),
    )
    for name, value, fits, allowed in (
        ("temperature", row.temperature, 0 <= row.temperature < float("inf"), "at least 0"),
        ("top_p", row.top_p, 0 < row.top_p <= 1, "in (0, 1]"),
        ("min_p", row.min_p, 0 <= row.min_p <= 1, "in [0, 1]"),
        ("xtc_probability", row.xtc_probability, 0 <= row.xtc_probability <= 1, "in [0, 1]"),
        ("xtc_threshold", row.xtc_threshold, 0 <= row.xtc_threshold <= 0.5, "in [0, 0.5]"),
        ("num_top_logprobs", row.num_top_logprobs, (row.num_top_logprobs or 0) <= MAX_TOP_LOGPROBS, "at most 20"),
    ):
        if not fits:
            raise ProtocolError(f"sequence {seq_id}: {name} is {value}; it must be {allowed}")
    return row
