"""Which sequences guess tokens, how many, and whether that pays.

A step that verifies drafts runs them as rows behind the sequence's next one. Each row is drawn as if it were alone,
with the draw of its (seed, position): a draft is right if it is that very token. So speculation changes no answer,
greedy or not, and the answers' distribution is the model's.

What a row more costs is learned from the steps themselves, as seconds = fixed + rows * each. A sequence whose guesses
come true with probability p gains p^j tokens by its j-th draft. It pays as long as they come faster than those of the
step without it, rows / (fixed + rows * each) a second: so as long as p^j is more than the rows' share of the step. At
small batches, where the weights are read for a few rows, that share is small; where rows fill the machine it is 1, and
nothing is guessed. A draft model's time for a guess is added to what a row costs.
"""

from collections.abc import Sequence

from protos.cidery.v1 import sampling_pb2
from worker.draft import DraftModel, Wanted
from worker.drafting import Drafting, Outlook, Source, StepCost, net_gain, paying_depth
from worker.errors import ProtocolError
from worker.ngram import NgramProposer
from worker.sequences import SequenceState

# A state that has seen a wrong draft is left as it was, and the next step runs what was right of it again.
_REPLAY_FACTOR = 2.0
# Of a forward of the draft model, what a row more costs.
_CHECK_SHARE = 0.1
_OFF = (sampling_pb2.SPECULATION_UNSPECIFIED, sampling_pb2.SPECULATION_OFF)


class Speculation:
    """Of one engine: which drafts run in a step, and what is learned of it."""

    def __init__(self, *, max_drafts: int = 0, has_states: bool = False, draft: DraftModel | None = None) -> None:
        """`max_drafts` of one sequence in a step; 0: nobody guesses."""
        self.max_drafts = max_drafts
        self._has_states = has_states
        self._draft = draft
        self.cost = StepCost()

    @property
    def num_bytes(self) -> int:
        """Memory of the draft model."""
        return 0 if self._draft is None else self._draft.num_bytes

    def begin(
        self, method: sampling_pb2.Speculation, token_ids: list[int], stop_token_ids: frozenset[int]
    ) -> Drafting | None:
        """For a new sequence; None if it doesn't guess. The list is followed as it grows.

        Raises ProtocolError for a draft model that isn't there.
        """
        if not self.max_drafts or method in _OFF:
            return None
        if method == sampling_pb2.SPECULATION_DRAFT and self._draft is None:
            raise ProtocolError("a sequence is to be guessed by a draft model, and this worker has none")
        always = {sampling_pb2.SPECULATION_NGRAM: Source.NGRAM, sampling_pb2.SPECULATION_DRAFT: Source.DRAFT}
        return Drafting(token_ids, NgramProposer(token_ids), always.get(method), stop_token_ids)

    def forget(self, seq_id: int) -> None:
        """The sequence has ended."""
        if self._draft is not None:
            self._draft.forget(seq_id)

    def reset(self) -> None:
        """All have."""
        if self._draft is not None:
            self._draft.reset()

    def drafts(self, granted: Sequence[tuple[SequenceState, int]], num_rows: int) -> dict[int, list[int]]:
        """Guesses for the next rows of sequences that may have so many, beside `num_rows` rows of all, by seq_id."""
        found: dict[int, list[int]] = {}
        wanted: dict[int, Wanted] = {}
        by_id: dict[int, Drafting] = {}
        for sequence, max_drafts in granted:
            drafting = sequence.drafting
            assert drafting is not None
            forced = sequence.rules.forced() if sequence.rules is not None else []
            source, depth = (Source.GRAMMAR, len(forced)) if forced else self._choose(drafting, num_rows)
            drafting.source, depth = source, min(depth, max_drafts)
            if source is Source.DRAFT and depth:
                by_id[sequence.seq_id] = drafting
                wanted[sequence.seq_id] = self._wanted(sequence.token_ids, drafting, depth, num_rows)
            else:
                found[sequence.seq_id] = forced[:depth] if forced else drafting.ngram.propose(depth)
        if wanted:
            assert self._draft is not None
            for seq_id, guesses in self._draft.propose(wanted).items():
                found[seq_id] = [guess.token_id for guess in guesses]
                by_id[seq_id].confidences = [guess.confidence for guess in guesses]
        return {sequence.seq_id: _usable(sequence, found.get(sequence.seq_id, [])) for sequence, _ in granted}

    def num_wanted(self, sequence: SequenceState, num_rows: int) -> int:
        """How many drafts the manager should allow next time."""
        drafting, rules = sequence.drafting, sequence.rules
        assert drafting is not None
        if rules is not None and rules.grammar is not None and (not self._has_states or rules.forced()):
            # The next token may be one that forces those after it.
            return self.max_drafts
        source, depth = self._choose(drafting, num_rows)
        # With states, a plan without drafts can be made before its turn, which one with drafts can't.
        return 0 if source is Source.NGRAM and self._has_states and not drafting.ngram.propose(1) else depth

    def _wanted(self, token_ids: Sequence[int], drafting: Drafting, depth: int, num_rows: int) -> Wanted:
        """Of the draft model: guesses up to a depth, as far as they pay; quickly where look-up knows what it says."""
        num_likely = min(depth - 1, paying_depth(drafting.chance, _CHECK_SHARE))
        return Wanted(
            token_ids, depth, drafting.ngram.propose(num_likely), Outlook(drafting.chances, self._draft_share(num_rows))
        )

    def _draft_share(self, num_rows: int) -> float:
        """What a guess by the draft model and its row take of a step, for each of so many rows."""
        assert self._draft is not None
        replays = _REPLAY_FACTOR if self._has_states else 1.0
        return min(1.0, self.cost.row_share(num_rows, self._draft.token_s / num_rows) * replays)

    def _choose(self, drafting: Drafting, num_rows: int) -> tuple[Source, int]:
        """By what to guess, and how far: whatever gains most, or what was asked for."""
        if drafting.always is not None:
            return drafting.always, self.max_drafts
        replays = _REPLAY_FACTOR if self._has_states else 1.0
        share = min(1.0, self.cost.row_share(num_rows) * replays)
        depth = min(self.max_drafts, paying_depth(drafting.chance, share))
        if self._draft is None:
            return Source.NGRAM, depth
        gain = net_gain(drafting.chance, share, depth) if drafting.ngram.propose(1) else 0.0
        dearer = self._draft_share(num_rows)
        deeper = min(self.max_drafts, paying_depth(drafting.draft_chance, dearer))
        if net_gain(drafting.draft_chance, dearer, deeper) > gain:
            # How far it goes is seen guess by guess, from how sure the model is.
            return Source.DRAFT, self.max_drafts
        return Source.NGRAM, depth


def _usable(sequence: SequenceState, drafts: list[int]) -> list[int]:
    """Those before the first that ends the answer or is none of the grammar's."""
    assert sequence.drafting is not None
    drafts = sequence.drafting.before_stop(drafts)
    return drafts if sequence.rules is None else sequence.rules.allowed(drafts)
