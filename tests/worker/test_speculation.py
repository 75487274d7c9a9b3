"""How many drafts pay: the rule, what is learned of steps and of sequences."""

import itertools
import random

import pytest

from protos.cidery.v1 import sampling_pb2
from worker.speculation import Speculation, StepCost, paying_depth


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


def speculation(**fields) -> Speculation:
    return Speculation(**{"max_drafts": 6} | fields)


def begin(guessing: Speculation, tokens: list[int], method=sampling_pb2.SPECULATION_AUTO, stops=()):
    return guessing.begin(method, tokens, frozenset(stops))


class TestSequences:
    @pytest.mark.parametrize("method", [sampling_pb2.SPECULATION_OFF, sampling_pb2.SPECULATION_UNSPECIFIED])
    def test_who_is_not_asked_does_not_guess(self, method):
        assert begin(speculation(), [1, 2], method) is None
        assert begin(Speculation(), [1, 2]) is None

    def test_text_that_repeats_itself_gets_longer_drafts_until_it_stops_to(self):
        guessing = speculation()
        tokens = [1, 2, 3, 4] * 3
        drafting = begin(guessing, tokens)
        first = guessing.num_wanted(drafting, None, 1)
        for _ in range(20):
            tokens.append(tokens[-4])
            drafting.follow()
        assert 0 < first < guessing.num_wanted(drafting, None, 1) == 6
        assert guessing.drafts(drafting, None, 6, 1) == (tokens[-4:] * 2)[:6]
        rng = random.Random(2)
        for _ in range(400):
            tokens.append(rng.randrange(6))
            drafting.follow()
        # One in six: less than a row costs beside three others.
        assert guessing.num_wanted(drafting, None, 4) == 0

    def test_many_rows_leave_no_room_for_guesses_unless_they_are_wanted_in_any_case(self):
        guessing, tokens = speculation(), [1, 2, 3, 4] * 3
        for _ in range(200):
            guessing.cost.ran(8, 0.008)
            guessing.cost.ran(16, 0.016)
        assert guessing.num_wanted(begin(guessing, tokens), None, 16) == 0
        always = begin(guessing, tokens, sampling_pb2.SPECULATION_NGRAM)
        assert guessing.num_wanted(always, None, 16) == 6
        assert guessing.drafts(always, None, 2, 16) == [1, 2]

    def test_no_draft_ends_an_answer(self):
        guessing = speculation()
        drafting = begin(guessing, [1, 2, 3, 4, 9, 5, 1, 2, 3], sampling_pb2.SPECULATION_NGRAM, stops=[9])
        assert guessing.drafts(drafting, None, 6, 1) == [4]

    def test_with_states_only_who_has_a_guess_asks_for_room(self):
        guessing = speculation(has_states=True)
        assert guessing.num_wanted(begin(guessing, [1, 2, 3, 4]), None, 1) == 0
        assert guessing.num_wanted(begin(guessing, [1, 2, 3, 4, 1, 2, 3]), None, 1) > 0
