"""Prompt look-up: what it guesses, what it says of its guesses, and that it never falls behind its list."""

import random

import pytest

from worker.ngram import GRAM_TOKENS, NgramProposer


def naive_next(tokens: list[int], place: int) -> int | None:
    """After `place` tokens: where the newest earlier occurrence of the last gram ends."""
    gram = tokens[place - GRAM_TOKENS : place]
    ends = range(place - 1, GRAM_TOKENS - 1, -1)
    return next((end for end in ends if len(gram) == GRAM_TOKENS and tokens[end - GRAM_TOKENS : end] == gram), None)


class NaiveProposer:
    """The same by search, from the first token on."""

    def __init__(self, tokens: list[int], num_prompt: int) -> None:
        self.tokens = tokens
        self.next = naive_next(tokens[:num_prompt], num_prompt)
        self.seen = num_prompt

    def follow(self) -> tuple[int, int]:
        guessed = right = 0
        while self.seen < len(self.tokens):
            is_right = self.next is not None and self.tokens[self.next] == self.tokens[self.seen]
            guessed += self.next is not None
            right += is_right
            self.seen += 1
            self.next = self.next + 1 if is_right else naive_next(self.tokens[: self.seen], self.seen)
        return guessed, right

    def propose(self, num_tokens: int) -> list[int]:
        if self.next is None:
            return []
        known = list(self.tokens)
        for place in range(self.next, self.next + num_tokens):
            known.append(known[place])
        return known[len(self.tokens) :]


@pytest.mark.parametrize("num_prompt", range(GRAM_TOKENS + 2))
def test_short_lists_guess_nothing_that_was_not_there(num_prompt):
    tokens = list(range(num_prompt))
    assert NgramProposer(tokens).propose(4) == []


def test_a_passage_that_comes_again_is_guessed_to_its_end_and_around():
    tokens = [5, 6, 7, 8, 9, 1, 5, 6, 7]
    assert NgramProposer(tokens).propose(3) == [8, 9, 1]
    # Beyond the end it repeats itself.
    assert NgramProposer(tokens).propose(9) == [8, 9, 1, 5, 6, 7, 8, 9, 1]
    assert NgramProposer([4] * 5).propose(3) == [4, 4, 4]


def test_a_passage_is_followed_and_left_where_it_parts():
    tokens = [1, 2, 3, 4, 5, 6, 7, 20, 1, 2, 3]
    proposer = NgramProposer(tokens)
    assert proposer.propose(2) == [4, 5]
    tokens += [4, 5]
    assert proposer.follow() == (2, 2)
    assert proposer.propose(2) == [6, 7]
    tokens += [9, 9]
    # The second one was not guessed at: there was nothing like it.
    assert proposer.follow() == (1, 0)
    assert proposer.propose(2) == []


@pytest.mark.parametrize("vocab", [2, 3, 40, 100_000])
@pytest.mark.parametrize("seed", range(3))
def test_it_guesses_what_a_search_finds(vocab, seed):
    """Growing by one token or several at once, past every size of its table.

    Grams that share a slot forget each other, so with few different ones it must agree everywhere, else nearly.
    """
    rng = random.Random(seed)
    tokens = [rng.randrange(vocab) for _ in range(rng.choice((0, 3, 50, 300)))]
    fast, naive = NgramProposer(tokens), NaiveProposer(tokens, len(tokens))
    num_same = num_all = 0
    while len(tokens) < 1200:
        if len(tokens) > 20 and rng.random() < 0.3:
            first = rng.randrange(len(tokens) - 10)
            tokens += tokens[first : first + rng.randint(1, 10)]
        else:
            tokens.append(rng.randrange(vocab))
        assert (fast.follow() == naive.follow()) or vocab > 3
        num_all += 1
        num_same += fast.propose(5) == naive.propose(5)
    assert num_same == num_all if vocab <= 3 else num_same > 0.8 * num_all
