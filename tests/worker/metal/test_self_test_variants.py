"""An engine launches nothing that the self-test of its model did not: each is a kernel of its own to Metal's compiler.

A variant is what MLX names a kernel by: its name, its template, and the types of its arrays, with those below 8
elements, which lie in another address space.
"""

import re

import mlx.core as mx
import pytest

from tests.golden.cases import config_of, make_model
from tests.golden.in_process import InProcessMac
from tests.msl_host.host import MslHost
from tests.msl_host.require import require_toolchain
from tests.worker.metal.engine_kinds import KINDS, answers, load
from worker import kernel_needs
from worker.metal import dispatch, self_test_cases
from worker.metal.decode_checks import VerifyNeeds

_MAX_DRAFTS = 3
_PROMPTS = [[5 + number, 6, 7] * (1 + number) for number in range(10)]


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    require_toolchain()
    monkeypatch.setattr(self_test_cases, "_CHAIN_STEPS", 4)
    # Fused CPU kernels cost seconds of compiler each.
    mx.disable_compile()
    yield
    mx.enable_compile()


class Named(MslHost):
    """The harness, which notes MLX's name of each kernel that it ran."""

    def __init__(self) -> None:
        super().__init__()
        self.variants: set[str] = set()

    def _run(self, job, dtypes):
        self.variants.add(job.signature.kernel_name)
        return super()._run(job, dtypes)


def _tested(kind, *more):
    """Kernels as a worker would have them, their host, and what the self-test launched."""
    host = Named()
    kernels = dispatch.choose_kernels([*kernel_needs.needs_of(load(kind), 16), *more], host)
    assert kernels.failed == ()
    assert host.variants
    tested = set(host.variants)
    host.variants.clear()
    return kernels, host, tested


def _crowd(kind, kernels, **options):
    """Ten sequences at once, one of which is preempted and comes back; with guesses if there are answers to guess."""
    case, changes, bits, _ = KINDS[kind]
    config = config_of(case) | changes
    mac = InProcessMac(make_model(case, config=config), config, kernels=kernels, kv_bits=bits, **options)
    for number, prompt in enumerate(_PROMPTS):
        mac.add(str(number), prompt, 8)
    for _ in range(6):
        mac.step()
    mac.preempt("1")
    mac.run()
    return mac


@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_launches_what_was_tested_alone(kind):
    kernels, host, tested = _tested(kind)
    answers(load(kind), kernels)
    assert host.variants
    _crowd(kind, kernels)
    assert host.variants - tested == set()


@pytest.mark.parametrize("kind", ["full", "window", "8 bits"])
def test_so_does_an_engine_whose_guesses_share_loads(monkeypatch, kind):
    monkeypatch.setenv("CIDERY_SPEC_VERIFY_WINDOW", "1")
    kernels, host, tested = _tested(kind, VerifyNeeds(1 + _MAX_DRAFTS))
    answered = _crowd(kind, kernels).answers.values()
    known = [[*prompt, *answer.tokens] for prompt, answer in zip(_PROMPTS, answered, strict=True)]
    mac = _crowd(kind, kernels, max_drafts=_MAX_DRAFTS, answers_to_guess=known)
    assert mac.num_accepted > 0
    shared = {rows for rows in range(2, 9) if any(_rows_of(name) == rows for name in host.variants)}
    assert shared == {2, 3, 4}
    assert host.variants - tested == set()


def _rows_of(variant: str) -> int:
    """Rows of a sequence that share loads, from the template of the merging kernel."""
    found = re.fullmatch(r"custom_kernel_cidery_paged_decode_merge_f32__float_\d+_(\d+)_.*", variant)
    return int(found[1]) if found else 0


def test_a_variant_that_was_not_tested_would_be_seen():
    """Fewer than 8 slots, were they not padded."""
    _, host, tested = _tested("short conv")
    from worker.metal.write_kv import PutBlocks

    pool = mx.zeros((4, 32))
    mx.eval(pool)
    PutBlocks(host)(mx.ones((2, 32)), mx.array([1, 2], mx.int32), pool)
    assert host.variants - tested
