"""How many drafts pay: the rule, what is learned of steps and of sequences."""

import itertools
import random

import pytest

from protos.cidery.v1 import sampling_pb2
from worker.draft_memory import Guess
from worker.drafting import StepCost, paying_depth
from worker.errors import ProtocolError
from worker.speculation import Speculation


def gain(chance: float, depth: int, num_rows: int, fixed: float, each: float) -> float:
    """Tokens a second of a batch whose first row has so many drafts."""
    tokens = num_rows + sum(chance**j for j in range(1, depth + 1))
    return tokens / (fixed + each * (num_rows + depth))


class TestPayingDepth:
    @pytest.mark.parametrize("chance", [0.05, 0.3, 0.6, 0.9, 0.97])
    @pytest.mark.parametrize("num_rows", [1, 4, 16, 64])
    @pytest.mark.parametrize("each", [0.01, 0.1, 1.0])
    def test_each_draft_is_faster_than_the_batch_without_it(self, chance, num_rows, each):
        """The first draft taken pays at once, and the first left out would not."""
        share = each * num_rows / (1 + each * num_rows)
        depth = paying_depth(chance, share)
        base = num_rows / (1 + each * num_rows)
        for j in range(1, depth + 1):
            assert chance**j / each >= base * 0.999
        assert chance ** (depth + 1) / each <= base * 1.001 or depth == 64
        if depth:
            assert gain(chance, depth, num_rows, 1, each) > gain(chance, 0, num_rows, 1, each)

    def test_the_ends(self):
        assert paying_depth(1.0, 0.5) == 64
        assert paying_depth(0.0, 0.001) == 0
        assert paying_depth(0.5, 1.0) == 0


class TestStepCost:
    def test_before_any_step_rows_are_assumed_to_be_cheap(self):
        assert StepCost().row_share(1) == pytest.approx(0.1)
        assert StepCost().row_share(100) == 1.0

    @pytest.mark.parametrize("each", [0.0002, 0.002, 0.02])
    def test_it_learns_a_line(self, each):
        cost, rng = StepCost(), random.Random(1)
        for _ in range(600):
            rows = rng.randint(1, 12)
            cost.ran(rows, (0.01 + each * rows) * rng.uniform(0.95, 1.05))
        for rows in (1, 4, 12):
            assert cost.row_share(rows) == pytest.approx(each * rows / (0.01 + each * rows), rel=0.25)

    def test_one_size_alone_says_nothing_of_rows(self):
        cost = StepCost()
        for _ in range(100):
            cost.ran(1, 0.01)
        assert cost.row_share(1) == pytest.approx(0.1, rel=0.05)

    def test_rows_that_seem_to_cost_less_than_nothing_cost_little(self):
        cost = StepCost()
        for rows in itertools.islice(itertools.cycle((1, 9)), 200):
            cost.ran(rows, 0.02 - 0.001 * rows)
        assert 0 < cost.row_share(4) < 0.01


class Sequence:
    """What is looked at of a sequence."""

    rules = None

    def __init__(self, drafting, seq_id: int = 1) -> None:
        self.seq_id = seq_id
        self.drafting = drafting
        self.token_ids = drafting.token_ids


class FakeDraft:
    """Guesses sevens, and is sure of them."""

    num_bytes = 5

    def __init__(self, token_s: float) -> None:
        self.token_s = token_s

    def propose(self, wanted):
        return {seq_id: self._guesses(each) for seq_id, each in wanted.items()}

    def _guesses(self, asked) -> list[Guess]:
        guesses = [Guess(7, 1.0)]
        while len(guesses) < asked.num_drafts and asked.is_worth_another(guesses):
            guesses.append(Guess(7, 1.0))
        return guesses


def speculation(**fields) -> Speculation:
    return Speculation(**{"max_drafts": 6} | fields)


def begin(guessing: Speculation, tokens: list[int], method=sampling_pb2.SPECULATION_AUTO, stops=()):
    return Sequence(guessing.begin(method, tokens, frozenset(stops)))


def guess(guessing: Speculation, sequence, max_drafts: int, num_rows: int) -> list[int]:
    return guessing.drafts([(sequence, max_drafts)], num_rows)[sequence.seq_id]


class TestSequences:
    @pytest.mark.parametrize("method", [sampling_pb2.SPECULATION_OFF, sampling_pb2.SPECULATION_UNSPECIFIED])
    def test_who_is_not_asked_does_not_guess(self, method):
        assert speculation().begin(method, [1, 2], frozenset()) is None
        assert Speculation().begin(sampling_pb2.SPECULATION_AUTO, [1, 2], frozenset()) is None

    def test_text_that_repeats_itself_gets_longer_drafts_until_it_stops_to(self):
        guessing = speculation()
        tokens = [1, 2, 3, 4] * 3
        sequence = begin(guessing, tokens)
        first = guessing.num_wanted(sequence, 1)
        for _ in range(20):
            tokens.append(tokens[-4])
            sequence.drafting.follow(0, 0)
        assert 0 < first < guessing.num_wanted(sequence, 1) == 6
        assert guess(guessing, sequence, 6, 1) == (tokens[-4:] * 2)[:6]
        rng = random.Random(2)
        for _ in range(400):
            tokens.append(rng.randrange(6))
            sequence.drafting.follow(0, 0)
        # One in six: less than a row costs beside three others.
        assert guessing.num_wanted(sequence, 4) == 0

    def test_many_rows_leave_no_room_for_guesses_unless_they_are_wanted_in_any_case(self):
        guessing, tokens = speculation(), [1, 2, 3, 4] * 3
        for _ in range(200):
            guessing.cost.ran(8, 0.008)
            guessing.cost.ran(16, 0.016)
        assert guessing.num_wanted(begin(guessing, tokens), 16) == 0
        always = begin(guessing, tokens, sampling_pb2.SPECULATION_NGRAM)
        assert guessing.num_wanted(always, 16) == 6
        assert guess(guessing, always, 2, 16) == [1, 2]

    def test_no_draft_ends_an_answer(self):
        guessing = speculation()
        sequence = begin(guessing, [1, 2, 3, 4, 9, 5, 1, 2, 3], sampling_pb2.SPECULATION_NGRAM, stops=[9])
        assert guess(guessing, sequence, 6, 1) == [4]

    def test_with_states_only_who_has_a_guess_asks_for_room(self):
        guessing = speculation(has_states=True)
        assert guessing.num_wanted(begin(guessing, [1, 2, 3, 4]), 1) == 0
        assert guessing.num_wanted(begin(guessing, [1, 2, 3, 4, 1, 2, 3]), 1) > 0


class TestDraftModels:
    def test_one_that_is_not_there_is_refused(self):
        with pytest.raises(ProtocolError, match="by a draft model, and this worker has none"):
            speculation().begin(sampling_pb2.SPECULATION_DRAFT, [1], frozenset())
        assert speculation().num_bytes == 0
        assert speculation(draft=FakeDraft(0.0)).num_bytes == 5

    def test_it_guesses_where_there_is_nothing_to_look_up_and_look_up_where_it_is_as_good(self):
        guessing = speculation(draft=FakeDraft(1e-4))
        guessing.cost.ran(1, 0.01)
        assert set(guess(guessing, begin(guessing, [1, 2, 3, 4]), 6, 1)) == {7}
        assert guess(guessing, begin(guessing, [1, 2, 3, 4, 1, 2, 3]), 6, 1)[0] == 4

    def test_one_that_is_slow_or_wrong_is_left_and_tried_again_much_later(self):
        slow = speculation(draft=FakeDraft(0.02))
        slow.cost.ran(1, 0.01)
        assert guess(slow, begin(slow, [1, 2, 3, 4]), 6, 1) == []
        guessing, tokens = speculation(draft=FakeDraft(1e-3)), [1, 2]
        guessing.cost.ran(1, 0.01)
        sequence, tries = begin(guessing, tokens), []
        for place in range(600):
            num_drafts = len(guess(guessing, sequence, 6, 1))
            tries.append(num_drafts)
            tokens.append(1000 + place)
            sequence.drafting.follow(num_drafts, 0)
        assert tries[0] > 1
        assert 2 < sum(tries) < 80
        assert any(tries[300:])

    def test_who_asks_for_it_has_it_always(self):
        guessing = speculation(draft=FakeDraft(1.0))
        sequence = begin(guessing, [1, 2, 3, 1, 2, 3], sampling_pb2.SPECULATION_DRAFT, stops=[9])
        assert guessing.num_wanted(sequence, 50) == 6
        # One at the least, whatever it costs.
        assert guess(guessing, sequence, 4, 50) == [7]

    def test_guessing_ends_where_the_model_is_no_longer_sure_enough(self):
        guessing, tokens = speculation(draft=FakeDraft(1e-3)), [1, 2]
        guessing.cost.ran(1, 0.01)
        sequence = begin(guessing, tokens, sampling_pb2.SPECULATION_DRAFT)
        seen = []
        guessing._draft.propose = lambda wanted: seen.append(wanted[1]) or {1: [Guess(7, 0.95)]}
        guess(guessing, sequence, 6, 1)
        sure, unsure = [Guess(7, 0.95)], [Guess(7, 0.1)]
        assert all(seen[0].is_worth_another(sure * number) for number in (1, 6))
        assert not seen[0].is_worth_another(unsure * 2)
        for place in range(60):
            # What it is sure of never comes true.
            guess(guessing, sequence, 6, 1)
            tokens.append(1000 + place)
            sequence.drafting.follow(1, 0)
        guess(guessing, sequence, 6, 1)
        assert not seen[-1].is_worth_another(sure)

    def test_it_is_asked_to_check_what_look_up_says_as_far_as_that_is_good(self):
        guessing, tokens, seen = speculation(draft=FakeDraft(1e-3)), [1, 2, 3, 4] * 5, []
        guessing._draft.propose = lambda wanted: seen.append(wanted[1]) or {}
        sequence = begin(guessing, tokens, sampling_pb2.SPECULATION_DRAFT)
        for _ in range(20):
            tokens.append(tokens[-4])
            sequence.drafting.follow(0, 0)
        guess(guessing, sequence, 6, 1)
        assert seen[-1].likely == (tokens[-4:] * 2)[:5]
        rng = random.Random(2)
        for _ in range(400):
            tokens.append(rng.randrange(40))
            sequence.drafting.follow(0, 0)
        guess(guessing, sequence, 6, 1)
        assert seen[-1].likely == []
