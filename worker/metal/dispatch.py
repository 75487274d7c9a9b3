"""The one place that decides between a Metal kernel and plain MLX, kernel by kernel, for the model that is loaded."""

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from worker import switches
from worker.evaluation import Evaluator
from worker.metal import prefill, self_test, state_kernels
from worker.metal.decode_checks import LatentNeeds
from worker.metal.factory import MetalKernel
from worker.metal.in_place_writer import InPlaceWriter
from worker.metal.paged_decode import PagedDecode
from worker.metal.paged_prefill import PagedPrefill
from worker.metal.pool_writer import PoolWriter
from worker.metal.prefill import Prefill
from worker.metal.rope import Rope, RopeOptions
from worker.metal.scatter_writer import ScatterWriter
from worker.metal.self_test import AttentionNeeds, Family, Needs, RopeNeeds
from worker.metal.self_test_cases import FAMILIES
from worker.metal.state_kernels import StateKernels, twin_state_kernels
from worker.metal.state_self_test import GatedDeltaShape, Mamba2Shape, ShortConvShape

logger = logging.getLogger(__name__)

# Queries and keys `[rows, heads, head_dim]` and positions `[rows]`; both turned.
Turn = Callable[[mx.array, mx.array, mx.array, RopeOptions], tuple[mx.array, mx.array]]


_PLAIN = "mlx"


@dataclass(frozen=True, slots=True)
class Kernels:
    """What layers run on: None, or not so, is plain MLX. `name` is for people.

    `takes_ragged_rows`: all attention layers decode rows of any context lengths in one launch, without padding or
    masks. `reads_seen_slots_alone`: no attention touches a slot that its row does not see, whatever that may hold.
    `updates_states_in_place`: all recurrent layers run on `states`. `shares_verify_loads`: rows of a sequence that
    verify its guesses share each load of K and V, where that is of use (`may_share_loads`). `failed` are kernels that
    the self-test turned off.
    """

    name: str
    decode: PagedDecode | None = None
    latent_decode: PagedDecode | None = None
    prefill: Prefill | None = None
    latent_prefill: Prefill | None = None
    rope: Turn | None = None
    states: StateKernels = field(default_factory=twin_state_kernels)
    takes_ragged_rows: bool = False
    reads_seen_slots_alone: bool = False
    updates_states_in_place: bool = False
    shares_verify_loads: bool = False
    make_writer: Callable[[Evaluator], PoolWriter] = ScatterWriter
    # Tokens of the blocks that they were tested for; 0: any.
    block_size: int = 0
    failed: tuple[str, ...] = ()

    @property
    def are_plain(self) -> bool:
        """Whether none is used."""
        return self.name == _PLAIN


def twin_kernels(failed: Iterable[str] = ()) -> Kernels:
    """Everything in plain MLX."""
    return Kernels(_PLAIN, failed=tuple(failed))


def has_metal() -> bool:
    """Whether there is a GPU that kernels could run on."""
    return mx.metal.is_available()


def choose_kernels(needs: Needs, metal_kernel: MetalKernel | None = None) -> Kernels:
    """What runs a model with such needs on this machine; one line of the log says what, and why.

    `metal_kernel` is MLX's where Metal is there. A kernel runs only if it agrees with its twin on this very GPU, for
    all that the model asks of it; each one that does not gives way to plain MLX by itself.
    """
    memory = None
    if metal_kernel is None and not has_metal():
        logger.info("kernels: plain MLX, because this machine has no Metal")
        return twin_kernels()
    if not needs:
        logger.info("kernels: plain MLX, because no layer of the model could run on any")
        return twin_kernels()
    if metal_kernel is None:
        metal_kernel = mx.fast.metal_kernel
        try:
            memory = self_test.ResultMemory(needs)
        except OSError as error:
            logger.warning("results of the self-test can't be kept, each start will test again: %s", error)
    families, reasons = _families(needs)
    report = self_test.run(families, needs, metal_kernel, memory)
    kernels = assemble(metal_kernel, needs, report.passed, report.failures)
    off = [f"{name}: {reason}" for name, reason in reasons.items()]
    off += [f"{name}: it failed the self-test" for name in report.failures]
    logger.info(
        "kernels: %s (tested in %.1f s)%s", kernels.name, report.seconds, f"; off: {'; '.join(off)}" if off else ""
    )
    return kernels


def assemble(metal_kernel: MetalKernel, needs: Needs, works: Collection[str], failed: Iterable[str] = ()) -> Kernels:
    """The kernels for a model's needs, of the families that work."""
    attention = [need for need in needs if isinstance(need, AttentionNeeds)]
    has_latents = any(isinstance(need, LatentNeeds) for need in needs)
    decodes = bool(attention) and "paged_decode" in works
    decodes_latents = has_latents and "latent_decode" in works
    prefills = bool(attention) and "paged_prefill" in works
    prefills_latents = has_latents and "latent_prefill" in works
    shapes = {name: shape for name, shape in state_kernels.SHAPES.items() if any(isinstance(n, shape) for n in needs)}
    updates_states = bool(shapes) and set(works) >= shapes.keys()
    writes = {"write_quantized" if need.bits else "write_kv" for need in attention}
    writes |= {"write_quantized" for need in needs if isinstance(need, LatentNeeds) and need.bits}
    decodes_all = decodes == bool(attention) and decodes_latents == has_latents
    prefills_all = prefills == bool(attention) and prefills_latents == has_latents
    reads_seen = decodes_all and prefills_all and (decodes or decodes_latents)
    # Each reader must take the token of the writes: plain MLX attention doesn't.
    in_place = {"in_place", "put_blocks", *writes} <= set(works) and reads_seen
    states = state_kernels.state_kernels(metal_kernel, shapes) if updates_states else twin_state_kernels()
    shares_verify_loads = decodes and "verify_window" in works and switches.is_on(switches.SPEC_VERIFY_WINDOW)
    ropes = "rope" in works and any(isinstance(need, RopeNeeds) for need in needs)
    used = {
        "paged_decode": decodes,
        "latent_decode": decodes_latents,
        "paged_prefill": prefills,
        "latent_prefill": prefills_latents,
        "rope": ropes,
        **dict.fromkeys(shapes, updates_states),
        "verify_window": shares_verify_loads,
        "writes in place": in_place,
    }
    names = [name for name, is_used in used.items() if is_used]
    return Kernels(
        f"metal {', '.join(names)}" if names else _PLAIN,
        decode=PagedDecode(metal_kernel) if decodes else None,
        latent_decode=PagedDecode(metal_kernel) if decodes_latents else None,
        prefill=Prefill(PagedPrefill(metal_kernel)) if prefills else None,
        latent_prefill=Prefill(PagedPrefill(metal_kernel)) if prefills_latents else None,
        rope=Rope(metal_kernel) if ropes else None,
        states=states,
        takes_ragged_rows=decodes_all and (decodes or decodes_latents),
        reads_seen_slots_alone=reads_seen,
        updates_states_in_place=updates_states,
        shares_verify_loads=shares_verify_loads,
        make_writer=(lambda _: InPlaceWriter(metal_kernel)) if in_place else ScatterWriter,
        block_size=next((need.block_size for need in needs if isinstance(need, (AttentionNeeds, LatentNeeds))), 0),
        failed=tuple(failed),
    )


def _families(needs: Needs) -> tuple[list[Family], dict[str, str]]:
    """What to test for such needs, and why other kernels that concern them are out of the question."""
    wanted: list[str] = []
    reasons: dict[str, str] = {}
    attention = [need for need in needs if isinstance(need, AttentionNeeds)]
    if attention:
        decode_beyond = _beyond(attention, lambda need: PagedDecode.supports(need.head_dim, need.value_dim))
        prefill_beyond = _beyond(
            attention,
            lambda need: prefill.supports(need.head_dim, need.value_dim, need.dtype),
        )
        for name, beyond in (("paged_decode", decode_beyond), ("paged_prefill", prefill_beyond)):
            if beyond is None:
                wanted.append(name)
            else:
                reasons[name] = f"{beyond} is beyond what it supports"
        wanted += ["write_kv"] if not reasons else []
        if "paged_decode" in wanted and switches.is_on(switches.SPEC_VERIFY_WINDOW):
            wanted.append("verify_window")
    latents = [need for need in needs if isinstance(need, LatentNeeds)]
    for name, takes in _LATENT_KERNELS.items():
        beyond_latent = next((need for need in latents if not takes(need)), None)
        if beyond_latent is not None:
            reasons[name] = f"{beyond_latent} is beyond what it supports"
        elif latents:
            wanted.append(name)
    # Pools are written in place only if kernels read all of them.
    if wanted and not reasons:
        wanted += ["put_blocks", "in_place"]
        has_bits = any(need.bits for need in attention) or any(need.bits for need in latents)
        wanted += ["write_quantized"] if has_bits else []
    if any(isinstance(need, RopeNeeds) for need in needs):
        wanted.append("rope")
    states = [need for need in needs if isinstance(need, (GatedDeltaShape, Mamba2Shape, ShortConvShape))]
    if states and not switches.is_on(switches.GDN_LAZY_KERNELS):
        reasons["recurrent layers"] = f"{switches.GDN_LAZY_KERNELS}=0"
    else:
        wanted += [name for name, shape in state_kernels.SHAPES.items() if any(isinstance(n, shape) for n in states)]
    return [family for family in FAMILIES if family.name in wanted], reasons


def _prefills_latent(need: LatentNeeds) -> bool:
    return prefill.supports(need.latent_dim + need.rope_dim, need.latent_dim, need.dtype, is_latent=True)


# Kernels over latents, and what they take.
_LATENT_KERNELS: dict[str, Callable[[LatentNeeds], bool]] = {
    "latent_decode": lambda need: PagedDecode.supports(need.latent_dim + need.rope_dim, need.latent_dim),
    "latent_prefill": _prefills_latent,
}


def _beyond(needs: Sequence[AttentionNeeds], supports: Callable[[AttentionNeeds], bool]) -> AttentionNeeds | None:
    return next((need for need in needs if not supports(need)), None)
