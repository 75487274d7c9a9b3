"""One request while it is in the scheduler's hands."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from cluster.kv.hashing import HASH_BYTES
from cluster.kv.points import PointKind
from cluster.kv.sequence import ComputedBlocks
from cluster.scheduling.errors import ProtocolError
from cluster.scheduling.plan import PromptLogprobs
from cluster.scheduling.request import Pooling, Reading, Request, TokenLogprobs


@dataclass(slots=True, eq=False)
class LiveRequest:
    """Positions of its tokens, when running:

        [0, num_processed)          KV cached or computed for certain
        [num_processed, num_planned)    to be computed by a plan in flight
        [num_planned, num_known)    known tokens still to be planned: prefill
        [num_known, num_ahead)      tokens that plans in flight will sample

    num_known = len(token_ids). A decoding request has num_planned + 1 == num_ahead <= max_length: its next row runs
    the newest token, known or not. Nothing is planned once num_ahead == max_length.

    Where plans in flight allow drafts, num_planned and num_ahead are what they are if all drafts come true; each result
    takes back what did not.
    """

    request: Request
    arrival_s: float
    max_length: int
    token_ids: list[int]
    # Joined hashes of its full blocks, as far as they are known.
    hashes: bytearray
    num_ahead: int
    num_planned: int = 0
    num_processed: int = 0
    # The most that was planned of it before it had to wait again.
    num_run: int = 0
    is_running: bool = False
    # Its tier had no turn for too long before it was admitted: no priority is above it now.
    is_overdue: bool = False
    # The worker's name for it, new at every admission; 0 before the first, an id that the worker never sees.
    seq_id: int = 0
    # What the worker would like to guess beside its next row.
    num_wanted_drafts: int = 0
    # Prompt tokens that the Mac had planned when it came; with those on top that it had to compute itself then, its
    # turn: the lowest goes first. None until it is looked at.
    came_at: int = 0
    turn: int | None = None
    # The newest plan that has a row of it.
    last_step_id: int = 0
    num_cached_tokens: int = 0
    # None until it first runs.
    queue_s: float | None = None
    # The last look-up while it waits.
    computed: ComputedBlocks | None = None
    # The next token of its prompt whose log-probability is to be told, if such are wanted.
    next_scored: int = 1
    # The newest place of its prompt at which a state was kept.
    kept_at: int = 0
    # Where prefill stops for a checkpoint of a recurrent model: token offsets, multiples of the block size.
    stops: dict[int, PointKind] = field(default_factory=dict)

    @property
    def tenant(self) -> str:
        """Whose share it comes out of."""
        return self.request.tenant

    @property
    def weight(self) -> float:
        """The tenant's share in proportion to others'."""
        return self.request.tenant_weight

    @property
    def priority(self) -> int:
        """Higher goes first."""
        return self.request.priority

    @property
    def cost_tokens(self) -> int:
        """Tokens that it is expected to take, before it is known what is cached."""
        return self.max_length

    @property
    def reading(self) -> Reading | None:
        """What is still wanted of its prompt; a preemption costs nothing that has been told."""
        wanted = self.request.reading
        return None if wanted is None else replace(wanted, first_scored=self.next_scored)

    def reusable_hashes(self, block_size: int) -> bytes:
        """Of blocks that need not be run if they are cached: all, unless something is wanted of their rows."""
        if not self.runs_all:
            return bytes(self.hashes)
        # The row before a token is the one that predicts it.
        num_tokens = self.next_scored - 1 if self.is_scoring else 0
        return bytes(self.hashes[: num_tokens // block_size * HASH_BYTES])

    @property
    def is_scoring(self) -> bool:
        """Whether log-probabilities of its prompt are still to come."""
        wanted = self.request.reading
        if wanted is None or wanted.num_top_logprobs is None:
            return False
        return self.next_scored < self.request.num_prompt_tokens

    @property
    def runs_all(self) -> bool:
        """Whether rows of its prompt have to run though they be cached."""
        wanted = self.request.reading
        return wanted is not None and (wanted.pooling in (Pooling.MEAN, Pooling.CLS) or self.is_scoring)

    def take_scores(self, scores: PromptLogprobs) -> tuple[TokenLogprobs, ...]:
        """The next log-probabilities of its prompt. Raises ProtocolError if they are of other tokens."""
        end = scores.start + len(scores.logprobs)
        if not self.is_scoring or scores.start != self.next_scored or end > self.request.num_prompt_tokens:
            raise ProtocolError(
                f"request {self.request.request_id}: got log-probabilities of tokens {scores.start} to {end - 1}, "
                f"wanted are those from {self.next_scored} to {self.request.num_prompt_tokens - 1}"
            )
        tokens = self.token_ids[scores.start : end]
        self.next_scored = end
        return tuple(map(TokenLogprobs, tokens, scores.logprobs, scores.top))

    def forget_progress(self) -> None:
        """Its blocks are gone: all of its tokens are to be run again."""
        self.num_run = max(self.num_run, self.num_planned)
        self.num_planned = self.num_processed = 0
        self.computed = None

    def extend_chain(self, first_index: int, hashes: bytes) -> None:
        """Append block hashes that it did not know, and compare the rest. Raises ProtocolError if they differ."""
        at = first_index * HASH_BYTES
        known = bytes(self.hashes[at : at + len(hashes)])
        if at > len(self.hashes) or hashes[: len(known)] != known:
            raise ProtocolError(
                f"request {self.request.request_id}: blocks from {first_index} on were reported as {hashes.hex()}, "
                f"known are {len(self.hashes) // HASH_BYTES} blocks, there {known.hex()}"
            )
        self.hashes += hashes[len(known) :]


def priorities_among(running: Iterable[LiveRequest]) -> Callable[[LiveRequest], int]:
    """A sort key: the priority of each, of one overdue the highest among them all."""
    highest = max((live.priority for live in running), default=0)
    return lambda live: highest if live.is_overdue else live.priority
