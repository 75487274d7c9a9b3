"""Quantised KV against mlx-lm over caches that hold rows rounded in the same way, by every path of the engine.

mlx-lm's own quantised cache exists for full attention alone. For other kinds its plain caches are given keys and values
that went through `mx.quantize` and back, which is what a quantised pool is.
"""

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import QuantizedKVCache, make_prompt_cache

from tests.golden import scenario
from tests.golden.cases import config_of, make_model
from tests.golden.in_process import InProcessMac
from tests.golden.test_isolation import PoisonedMac
from tests.golden.test_no_copies import WatchedMac
from tests.worker.families import VOCAB_SIZE
from worker.discovery import leaves_of

_HEADS = {"head_dim": 64}
_LATENTS = {"kv_lora_rank": 64, "qk_rope_head_dim": 32}
# One of each kind of cache, with heads wide enough for groups.
_CHANGES = {
    "llama tied": _HEADS,
    "gemma3_text": _HEADS,
    "gemma2": _HEADS,
    "gpt_oss": _HEADS,
    "llama4_text": _HEADS,
    "deepseek_v3": _LATENTS,
    "deepseek_v32": _LATENTS | {"index_head_dim": 64},
    "qwen3_next": _HEADS,
    "gemma4_text with shared layers": _HEADS | {"global_head_dim": 64},
}


pytestmark = pytest.mark.usefixtures("no_compile")


def _rounded(array: mx.array, bits: int, group_size: int) -> mx.array:
    if array.shape[-1] == 0:
        return array
    options = {"group_size": group_size, "bits": bits}
    return mx.dequantize(*mx.quantize(array, **options), **options)


def rounding_caches(model, bits: int, group_size: int | None):
    """mlx-lm's caches, which are given rounded keys and values."""
    caches = make_prompt_cache(model)
    for leaf in leaves_of(caches):
        if hasattr(leaf, "update_and_fetch"):
            _round_into(leaf, bits, group_size)
    return caches


def _round_into(leaf, bits: int, group_size: int | None) -> None:
    fetch = leaf.update_and_fetch

    def update_and_fetch(keys, values):
        widths = {array.shape[-1] for array in (keys, values)} - {0}
        size = group_size or (64 if all(width % 64 == 0 for width in widths) else 32)
        return fetch(*(_rounded(array, bits, size) for array in (keys, values)))

    leaf.update_and_fetch = update_and_fetch


def _expected(model, bits, prompts):
    def rounding(model, prompt):
        return scenario.reference(model, prompt, prompt_cache=rounding_caches(model, bits, None))

    return scenario.expected_of(model, prompts, rounding)


def _pairs(answers, references):
    return [pair for path, each in references.items() for pair in zip(answers[path], each, strict=True)]


def _errors(pairs) -> list[float]:
    return [error for answer, expected in pairs for error in scenario.errors_of(answer, expected)]


def _gaps_where_tokens_part(pairs) -> list[float]:
    """For each answer that is another one: how far the two likeliest tokens lie apart where it begins to be."""
    gaps = []
    for answer, expected in pairs:
        for token, theirs, logprobs in zip(answer.tokens, expected.tokens, expected.logprobs, strict=True):
            if token != theirs:
                second, first = np.sort(logprobs)[-2:]
                gaps.append(float(first - second))
                break
    return gaps


_ALL = [(case, bits) for case in _CHANGES for bits in (8, 4)]
_ALWAYS = {("llama tied", 8), ("gemma3_text", 8), ("llama4_text", 4), ("deepseek_v3", 8), ("qwen3_next", 4)}


@pytest.mark.parametrize(
    ("case", "bits"), [each if each in _ALWAYS else pytest.param(*each, marks=pytest.mark.matrix) for each in _ALL]
)
def test_every_kind_gives_what_mlx_lm_gives_over_rounded_rows(case, bits):
    """Alone, in ragged batches, by chunks, from cached prefixes, preempted, beside a cancelled one.

    Sums of another order differ in their last bits, and once in a while such a value lies where rounding turns: then a
    code, or a group's scale, is another one, and what follows differs by a part of what rounding itself does.
    """
    config = config_of(case) | _CHANGES[case]
    model = make_model(case, config=config)
    prompts = scenario.prompts_of(VOCAB_SIZE)
    rounded, plain = _expected(model, bits, prompts), scenario.expected_of(model, prompts)
    mac = InProcessMac(model, config, kv_bits=bits)
    run = scenario.run(mac, prompts, scenario.follow_ups(prompts, VOCAB_SIZE))
    assert run.num_preempted == 2
    pairs = _pairs(run.answers, rounded)
    errors, effects = _errors(pairs), _errors(_pairs(run.answers, plain))
    assert np.median(errors) <= np.median(effects) / 20
    assert max(errors) <= max(effects) / 2
    # Tokens differ only where the two likeliest are nearer to each other than the answers are.
    assert all(gap <= 2 * max(errors) for gap in _gaps_where_tokens_part(pairs))


@pytest.mark.parametrize(("bits", "group_size"), [(8, 64), (8, 32), (4, 64), (4, 32)])
def test_full_attention_gives_what_mlx_lm_gives_over_its_own_quantised_cache(bits, group_size):
    """Quantised from the first token on, each prompt alone."""
    case = "qwen3 tied"
    config = config_of(case) | _HEADS
    model = make_model(case, config=config)
    mac = InProcessMac(model, config, kv_bits=bits, kv_group_size=group_size)
    rounded, plain = [], []
    for number, prompt in enumerate(scenario.prompts_of(VOCAB_SIZE)):
        caches = [QuantizedKVCache(group_size, bits) for _ in model.layers]
        answer = mac.add(f"{number}", prompt, scenario.NEW_TOKENS)
        mac.run()
        rounded.append((answer, scenario.reference(model, prompt, prompt_cache=caches)))
        plain.append((answer, scenario.reference(model, prompt)))
    assert all(answer.tokens == expected.tokens for answer, expected in rounded)
    errors = _errors(rounded)
    assert np.median(errors) <= scenario.LOGPROB_TOLERANCE
    assert max(errors) <= max(_errors(plain)) / 5


def test_prompts_cut_otherwise_and_sent_again_give_the_same_bits():
    """What is stored of a row follows from the row alone, so where the rows are the same bits, so is all that follows.

    Not so for rows of a batch on a CPU: a product of other rows may sum in another order.
    """
    config = config_of("llama tied") | _HEADS
    model = make_model("llama tied", config=config)
    prompt = scenario.prompts_of(VOCAB_SIZE)[2]
    whole, cut = (
        InProcessMac(model, config, kv_bits=4, max_chunk_tokens=size, max_num_batched_tokens=64) for size in (64, 24)
    )
    answers = []
    for mac in (whole, cut):
        for name in ("first", "again"):
            answers.append(mac.add(name, prompt, scenario.NEW_TOKENS))
            mac.run()
    assert [answer.num_cached_tokens for answer in answers] == [0, 63, 0, 63]
    for answer in answers[1:]:
        assert answer.tokens == answers[0].tokens
        tops = [[value for _, value in report.top] for report in answer.logprobs]
        np.testing.assert_allclose(tops, [[value for _, value in report.top] for report in answers[0].logprobs], 1e-5)


def _crowded(kind, model, config):
    """Eight requests at once where memory holds one and a half of the longest."""
    layout = InProcessMac(model, config, kv_bits=8, max_model_len=128).layout
    budget = int(1.5 * layout.bytes_for(128)) + layout.budget_bytes - layout.usable_bytes
    mac = kind(model, config, kv_bits=8, max_model_len=128, kv_budget_bytes=budget)
    rng = np.random.RandomState(2)
    for number in range(8):
        prompt = rng.randint(1, VOCAB_SIZE, (60, 33, 18, 5)[number % 4]).tolist()
        mac.add(f"{number}", prompt, 60)
    mac.run()
    return mac


@pytest.mark.parametrize("case", ["gemma3_text", "deepseek_v3", "qwen3_next"])
def test_freed_blocks_full_of_nan_are_read_by_nobody(case):
    """The same steps over pools whose blocks, scales and biases are poisoned once nobody has them: the same bits.

    Blocks change hands, boundaries between pools move and requests are preempted.
    """
    config = config_of(case) | _CHANGES[case]
    model = make_model(case, config=config)
    macs = [_crowded(kind, model, config) for kind in (InProcessMac, PoisonedMac)]
    plain, poisoned = ([(each.tokens, each.logprobs) for each in mac.answers.values()] for mac in macs)
    assert poisoned == plain
    assert all(mac.scheduler.stats().num_preemptions > 0 for mac in macs)
    assert all(mac.num_resizes > 0 or len(mac.layout.pools) == 1 for mac in macs)


@pytest.mark.parametrize("case", ["gemma3_text", "llama4_text"])
def test_pools_stay_where_they_are_and_no_step_needs_another_one(case):
    """Prefill, decode, joins, prefix hits with copies, a preemption, an abort."""
    config = config_of(case) | _CHANGES[case]
    mac = WatchedMac(make_model(case, config=config), config, kv_budget_bytes=1 << 28, kv_bits=8)
    mac.watch()
    prompts = scenario.prompts_of(VOCAB_SIZE)
    scenario.run(mac, prompts, scenario.follow_ups(prompts, VOCAB_SIZE))
    assert mac.num_resizes == 0


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("case", _CHANGES)
def test_pools_are_as_large_as_planned(case, bits):
    config = config_of(case) | _CHANGES[case]
    mac = InProcessMac(make_model(case, config=config), config, kv_bits=bits)
    planned = sum(pool.num_blocks * pool.page_bytes for pool in mac.layout.pools)
    assert mac.engine._tensors.total_bytes == planned
    plain = InProcessMac(make_model(case, config=config), config)
    assert mac.layout.token_capacity > plain.layout.token_capacity
    assert mac.root != plain.root
