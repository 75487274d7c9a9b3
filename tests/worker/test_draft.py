"""The draft model against mlx-lm's greedy generation, whatever it has to catch up with and however little it has."""

import json
import random
from dataclasses import replace

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step

from tests.golden.cases import config_of, make_model
from tests.worker.families import VOCAB_SIZE
from worker import models
from worker.draft import DraftModel, Wanted, check_tokens
from worker.drafting import Outlook
from worker.errors import UnsupportedModelError
from worker.metal.dispatch import twin_kernels

pytestmark = pytest.mark.usefixtures("no_compile")


def make(case="llama tied", *, kv_bytes=1 << 24, vocab_size=VOCAB_SIZE, in_place=False) -> DraftModel:
    loaded = models.adapt(make_model(case), config_of(case))
    kernels = replace(twin_kernels(), updates_states_in_place=in_place)
    return DraftModel(loaded, kernels, vocab_size=vocab_size, kv_bytes=kv_bytes)


def propose(draft: DraftModel, wanted: dict[int, Wanted]) -> dict[int, list[int]]:
    return {seq_id: [guess.token_id for guess in guesses] for seq_id, guesses in draft.propose(wanted).items()}


def greedy(case: str, tokens: list[int], num_tokens: int) -> list[int]:
    return [int(token) for token, _ in generate_step(mx.array(tokens), make_model(case), max_tokens=num_tokens)]


def looked_up(case: str, tokens: list[int], rng: random.Random) -> list[int]:
    """What the model will say, and something else from some token on."""
    num_right = rng.randint(0, 4)
    return [*greedy(case, tokens, num_right), *(rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(0, 3)))]


@pytest.mark.parametrize(
    ("case", "in_place"),
    [
        *[(case, False) for case in ("llama tied", "gemma3_text", "deepseek_v2", "qwen3_next", "mamba2", "lfm2")],
        # As on a GPU, where kernels update states in their slots.
        *[(case, True) for case in ("qwen3_next", "mamba2", "lfm2")],
    ],
)
def test_it_guesses_what_the_model_would_generate(case, in_place):
    """Several sequences at once, growing by what was guessed, by other tokens, and not at all."""
    draft, rng = make(case, in_place=in_place), random.Random(1)
    sequences = {
        seq_id: [rng.randrange(VOCAB_SIZE) for _ in range(length)] for seq_id, length in enumerate((1, 16, 40))
    }
    for _ in range(8):
        wanted = {
            seq_id: Wanted(tokens, rng.randint(1, 5), likely=looked_up(case, tokens, rng))
            for seq_id, tokens in sequences.items()
            if rng.random() < 0.8
        }
        found = propose(draft, wanted)
        assert set(found) == set(wanted)
        for seq_id, drafts in found.items():
            assert drafts == greedy(case, sequences[seq_id], wanted[seq_id].num_drafts)
            sequences[seq_id] += drafts[: rng.randint(0, len(drafts))]
            sequences[seq_id] += [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(0, 2))]


def test_a_long_prompt_is_caught_up_with_in_chunks_beside_others(monkeypatch):
    monkeypatch.setattr("worker.draft._MAX_ROWS", 64)
    draft, rng = make(), random.Random(2)
    long = [rng.randrange(VOCAB_SIZE) for _ in range(150)]
    wanted = {1: Wanted(long, 3), 2: Wanted([5, 6], 3)}
    expected = {1: greedy("llama tied", long, 3), 2: greedy("llama tied", [5, 6], 3)}
    for _ in range(2):
        assert propose(draft, wanted) == {2: expected[2]}
    assert propose(draft, wanted) == expected


def test_who_was_not_served_for_longest_gives_way_and_comes_again():
    draft = make(kv_bytes=1)
    token_bytes = draft._tensors.total_bytes // (3 * 16)
    draft = make(kv_bytes=4 * 16 * token_bytes)
    prompts = {seq_id: [seq_id + 3] * 20 for seq_id in range(3)}
    for seq_id in (0, 1, 2, 0):
        assert propose(draft, {seq_id: Wanted(prompts[seq_id], 2)}) == {
            seq_id: greedy("llama tied", prompts[seq_id], 2)
        }
    # Two at once don't fit: one of them has no guess.
    assert list(propose(draft, {each: Wanted(prompts[each], 2) for each in (1, 2)})) == [1]
    for seq_id in prompts:
        draft.forget(seq_id)
    draft.forget(77)
    assert sorted(draft._memory._free_blocks) == [1, 2, 3]
    draft.propose({1: Wanted([4], 2)})
    draft.reset()
    assert sorted(draft._memory._free_blocks) == [1, 2, 3]


def test_states_have_places_for_few_too():
    draft = make("mamba2", kv_bytes=1)
    prompts = {seq_id: [seq_id + 3] * 20 for seq_id in range(3)}
    for seq_id in (0, 1, 1, 2, 0):
        assert propose(draft, {seq_id: Wanted(prompts[seq_id], 2)}) == {seq_id: greedy("mamba2", prompts[seq_id], 2)}
    assert list(propose(draft, {each: Wanted(prompts[each], 2) for each in (1, 2)})) == [1]
    draft.forget(1)
    assert sorted(draft._memory._free_slots) == [1, 2]


def test_it_stops_where_no_further_guess_pays():
    draft, prompt = make(), [5, 6, 7]
    expected = greedy("llama tied", prompt, 5)
    for least, number in ((0.0, 5), (1.1, 1)):
        assert propose(draft, {1: Wanted(prompt, 5, outlook=Outlook([1.0] * 4, least))}) == {1: expected[:number]}


def test_what_is_looked_up_rightly_costs_one_forward(monkeypatch):
    draft, prompt = make(), [5, 6, 7]
    expected = greedy("llama tied", prompt, 6)
    spans = []
    forward = draft._forward
    monkeypatch.setattr(draft, "_forward", lambda asked: spans.append(asked) or forward(asked))
    assert propose(draft, {1: Wanted(prompt, 6, likely=expected)}) == {1: expected}
    assert [len(asked[1].token_ids) for asked in spans] == [len(prompt) + 5]
    spans.clear()
    # From the first wrong one on, one by one.
    wrong = [*expected[:3], expected[3] - 1, *expected[4:]]
    assert propose(draft, {1: Wanted(prompt, 6, likely=wrong)}) == {1: expected}
    assert [len(asked[1].token_ids) for asked in spans] == [1 + 5, 1, 1]


def test_tokens_that_one_of_the_models_does_not_have_are_not_guessed_at():
    narrow = make(vocab_size=5)
    assert max(propose(narrow, {1: Wanted([1, 2, 3], 6)})[1]) < 5
    assert make().propose({1: Wanted([1, VOCAB_SIZE], 3)}) == {}


def test_its_own_context_is_not_gone_beyond():
    draft = make()
    longest = draft._loaded.max_model_len
    assert draft.propose({1: Wanted([1] * longest, 1)}) == {}


def test_models_that_run_one_sequence_at_a_time_are_refused():
    with pytest.raises(UnsupportedModelError, match="can't be a draft model: it runs one sequence at a time"):
        make("deepseek_v32")


def test_it_must_have_the_same_tokens(tmp_path):
    for name, vocabulary in (("a", {"x": 0, "y": 1}), ("b", {"x": 0, "z": 1}), ("c", [["x", -1.0], ["y", -2.0]])):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}))
    check_tokens(tmp_path / "a", tmp_path / "c")
    with pytest.raises(UnsupportedModelError, match=r"1 of its 2 tokens are not those of .*a, which has 2"):
        check_tokens(tmp_path / "a", tmp_path / "b")
