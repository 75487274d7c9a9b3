"""The whole engine with the harness as its GPU, a tiny model of each kind of layer: the tokens of the path without one.

Kernels are found, tested and put together as a worker does it; but for one model the self-test's verdict is taken as
given, since each kernel's own tests run it at length.
"""

import mlx.core as mx
import numpy as np
import pytest

from tests.golden import scenario
from tests.golden.cases import config_of, make_model
from tests.golden.in_process import InProcessMac
from tests.msl_host.host import MslHost, engine_on_host
from tests.worker.metal.engine_kinds import KINDS, answers, load
from worker import dry_run, kernel_needs
from worker.engine import Engine
from worker.metal import dispatch, self_test_cases
from worker.metal.dispatch import twin_kernels
from worker.metal.self_test_cases import FAMILIES

pytestmark = pytest.mark.usefixtures("no_compile")


@pytest.mark.parametrize("kind", KINDS)
def test_engine_on_the_harness_gives_the_tokens_of_plain_mlx(kind):
    loaded = load(kind)
    tokens, logprobs = answers(loaded, twin_kernels())
    needs = kernel_needs.needs_of(loaded, 16)
    host = MslHost()
    kernels = dispatch.assemble(host, needs, {family.name for family in FAMILIES})
    our_tokens, our_logprobs = answers(loaded, kernels)
    assert our_tokens == tokens
    # In few bits, an element between two levels may become either.
    assert np.abs(our_logprobs - logprobs).max() < (1e-4 if KINDS[kind][2] is None else 1e-3)
    ran = {record.kernel.removeprefix("cidery_") for record in host.records}
    for name in KINDS[kind][3]:
        assert any(kernel.startswith(f"{name}_f32") for kernel in ran), f"{name} is not among {ran}"


@pytest.mark.parametrize("kind", ["window", "latent", "uneven widths", "delta net", "delta net and latents", "mamba-2"])
def test_kernels_take_every_path_of_the_engine_as_mlx_lm_would(kind):
    """Groups that share pools, cached prefixes, states kept on the way and copied, preemptions, under the scheduler."""
    case, changes, _, _ = KINDS[kind]
    config = config_of(case) | changes
    kernels = dispatch.assemble(MslHost(), kernel_needs.needs_of(load(kind), 16), {family.name for family in FAMILIES})
    checked = scenario.check(make_model(case, config=config), config, kernels=kernels)
    assert not checked.problems
    assert checked.max_logprob_error <= scenario.LOGPROB_TOLERANCE
    assert checked.mac.num_copies > 0 or not checked.mac.kv.has_states


def _guessing(kind: str, host: MslHost) -> tuple[list[list[int]], list[list[list]], list[list[int]]]:
    """Tokens and log-probabilities of an engine that guesses, right and wrong; and the tokens of mlx-lm."""
    case, changes, _, _ = KINDS[kind]
    config = config_of(case) | changes
    model, prompts = make_model(case, config=config), scenario.prompts_of(300)[:3]
    expected = [scenario.reference(model, prompt).tokens for prompt in prompts]
    kernels = dispatch.assemble(host, kernel_needs.needs_of(load(kind), 16), {family.name for family in FAMILIES})
    known = [prompt + tokens for prompt, tokens in zip(prompts, expected, strict=True)]
    mac = InProcessMac(make_model(case, config=config), config, kernels=kernels, max_drafts=3, answers_to_guess=known)
    added = [mac.add(str(i), prompt, scenario.NEW_TOKENS) for i, prompt in enumerate(prompts)]
    for _ in range(5):
        mac.step()
    mac.preempt("1")
    mac.run()
    assert mac.num_accepted > 0
    return [answer.tokens for answer in added], [answer.logprobs for answer in added], expected


@pytest.mark.parametrize("kind", ["latent", "delta net", "delta net and latents", "mamba-2", "uneven widths"])
def test_guessed_tokens_over_kernels_change_no_answer(kind):
    """Right and wrong ones; a step with guesses takes states out of their slots, the next finds them there again."""
    tokens, _, expected = _guessing(kind, MslHost())
    assert tokens == expected


@pytest.mark.parametrize("kind", ["full", "window", "delta net"])
def test_rows_of_guesses_that_share_loads_change_no_bit(monkeypatch, kind):
    """And read less, but for models that never share."""
    found, read = [], []
    for value in ("0", "1"):
        monkeypatch.setenv("CIDERY_SPEC_VERIFY_WINDOW", value)
        host = MslHost()
        tokens, logprobs, expected = _guessing(kind, host)
        assert tokens == expected
        found.append(logprobs)
        decodes = [record for record in host.records if "key_pool" in record.buffers and "items" in record.buffers]
        read.append(sum(record.buffers["key_pool"].bytes_read for record in decodes))
    assert found[0] == found[1]
    assert read[1] == read[0] if kind == "delta net" else read[1] < 0.75 * read[0]


def test_a_worker_starts_with_what_its_gpu_can_do(monkeypatch, caplog):
    """Self-test included; only the dispatch sees Metal."""
    monkeypatch.setattr(self_test_cases, "_CHAIN_STEPS", 4)
    host = MslHost()
    engine_on_host(monkeypatch, host)
    needs = kernel_needs.needs_of(load("soft cap"), 16)
    with caplog.at_level("INFO"):
        kernels = dispatch.choose_kernels(needs)
    assert kernels.name == "metal paged_decode, paged_prefill, writes in place"
    assert (kernels.failed, kernels.takes_ragged_rows) == ((), True)
    assert "kernels: metal paged_decode, paged_prefill, writes in place (tested in" in caplog.text
    assert not mx.metal.is_available()


@pytest.mark.parametrize("kind", ["full", "delta net", "8 bits"])
def test_the_dry_run_is_something_that_kernels_can_carry_out(kind):
    """No two rows go to one slot, no two sequences have one state: on a GPU that would be a race."""
    loaded = load(kind)
    kernels = dispatch.assemble(MslHost(), kernel_needs.needs_of(loaded, 16), {family.name for family in FAMILIES})
    limits = dry_run.StepLimits(max_num_seqs=3, max_num_batched_tokens=20, max_model_len=40)
    assert dry_run.activation_bytes(Engine(loaded, kernels, memory_limit_bytes=1 << 30), limits) > 0
