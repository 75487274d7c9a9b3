"""mlx-lm's own mixers with their states in slots of pools; the kernels run on the harness."""

import importlib
from dataclasses import fields

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import ArraysCache

from tests.msl_host.host import MslHost
from tests.msl_host.require import require_toolchain
from worker.metal import state_convs, state_twins, state_updates
from worker.metal.gated_delta import GatedDelta
from worker.metal.mamba2 import Mamba2
from worker.metal.short_conv import ShortConv
from worker.metal.state_kernels import StateKernels, twin_state_kernels
from worker.metal.state_rows import StateRows
from worker.metal.state_self_test import GatedDeltaShape
from worker.metal.state_updates import SlotStates

_PATCHED = ("gated_delta_update", "ssm_update", "__call__", "_conv", "_apply_conv1d", "_causal_conv")
_LENGTHS = (7, 1, 12)
_SLOTS = np.array([4, 1, 2], np.int32)
_MAMBA = {"mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 64, "n_groups": 2, "conv_kernel": 4}
_MAMBA2 = {"num_heads": 4, "head_dim": 16, "ssm_state_size": 64, "n_groups": 2, "conv_kernel": 4, "expand": 2}
_GRANITE = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 64, "mamba_n_groups": 2, "mamba_d_conv": 4}
_PLAMO = {"hidden_size_per_head": 16, "mamba_num_heads": 4, "mamba_d_state": 64, "mamba_d_conv": 4}
_KIMI = {"linear_attn_config": {"num_heads": 2, "head_dim": 32, "short_conv_kernel_size": 4}}
_LING = {"num_attention_heads": 2, "head_dim": 32, "short_conv_kernel_size": 4, "kda_lower_bound": -5.0}
_QWEN = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
}
_LIMIT = {
    "rope_parameters": None,
    "time_step_limit": (0.0, float("inf")),
    "hybrid_override_pattern": "M",
    "layer_types": ["mamba"],
}

# Module: (class, its configuration, positional arguments after it, which tensors of its cache may lie in slots).
_MIXERS = {
    "qwen3_next": ("Qwen3NextGatedDeltaNet", _QWEN, (), ["conv", "state"]),
    "qwen3_5": ("GatedDeltaNet", {**_QWEN, "rope_parameters": None}, (), ["conv", "state"]),
    "olmo_hybrid": ("GatedDeltaNet", {**_QWEN, "rope_parameters": {}}, (), ["conv", "conv", "conv", "state"]),
    "kimi_linear": ("KimiDeltaAttention", _KIMI, (0,), ["conv", "conv", "conv", "state"]),
    "bailing_moe_v3": ("BailingKDA", _LING, (), ["conv", "conv", "conv", "state"]),
    "nemotron_h": ("NemotronHMamba2Mixer", {**_MAMBA, **_LIMIT}, (), ["conv", "state"]),
    "plamo2": ("Mamba", _PLAMO, (), ["conv", "state"]),
    "falcon_h1": ("FalconH1Mixer", {**_GRANITE, "mamba_d_ssm": 64}, (), ["conv", "state"]),
    "mamba2": ("Mamba2Block", {**_MAMBA2, **_LIMIT}, (0,), ["conv", "state"]),
    "granitemoehybrid": ("GraniteMoeHybridMamba2Mixer", {**_GRANITE, **_LIMIT}, (), ["conv", "state"]),
    "lfm2": ("ShortConv", {**_LIMIT, "conv_L_cache": 3, "conv_bias": False, "layer_types": ["conv"]}, (0,), ["conv"]),
}


class _Pool:
    """A pool by itself, with the token of its last launch."""

    def __init__(self, array: mx.array) -> None:
        mx.eval(array)
        self.array = array
        self.token = None

    def update(self, launch):
        y, self.token = launch(self.array, after=self.token)
        return y


def _make(module, name):
    """Whatever the layer's configuration doesn't need is 1."""
    kind, sizes, rest, _ = _MIXERS[name]
    config = getattr(module, "TextModelArgs", module.ModelArgs)
    given = {field.name: 1 for field in fields(config) if field.init}
    sizes = {key: value for key, value in sizes.items() if key in given}
    return getattr(module, kind)(config(**{**given, "hidden_size": 32, **sizes}), *rest)


def _run(mixer, x, tensors):
    """The outputs, and what the mixer left in its cache."""
    cache = ArraysCache(size=len(tensors))
    cache.cache[:] = tensors
    return mixer(x, mask=None, cache=cache), cache.cache


def _alone(mixer, prompt, then, num_tensors):
    first, tensors = _run(mixer, prompt[None], [None] * num_tensors)
    second, _ = _run(mixer, then[None], tensors)
    return first[0], second[0], tensors


@pytest.fixture
def installed(monkeypatch, request):
    """The module, with our updates until the test ends."""
    module = importlib.import_module(f"mlx_lm.models.{request.param}")
    for holder in (module, *(value for value in vars(module).values() if isinstance(value, type))):
        for name in _PATCHED:
            if name in vars(holder):
                monkeypatch.setattr(holder, name, vars(holder)[name])
    for _ in range(2):
        state_updates.install(module)
        state_convs.install(module)
    return request.param, module


@pytest.mark.parametrize("installed", _MIXERS, indirect=True)
@pytest.mark.parametrize("which", ["kernels", "twins"])
def test_mixers_of_mlx_lm_run_over_slots(installed, which):
    """Prefills by themselves, then a decode row of each together: what each sequence gets alone."""
    require_toolchain()
    name, module = installed
    kinds = _MIXERS[name][3]
    mx.random.seed(3)
    mixer = _make(module, name)
    prompts = [mx.random.normal((length, 32)) for length in _LENGTHS]
    then = [mx.random.normal((1, 32)) for _ in _LENGTHS]
    alone = [_alone(mixer, prompt, row, len(kinds)) for prompt, row in zip(prompts, then, strict=True)]
    pools = [_Pool(mx.full((6, *tensor.shape[1:]), float("nan"))) for tensor in alone[2][2]]
    host = MslHost()
    metal = StateKernels(frozenset(), GatedDelta(host), Mamba2(host), ShortConv(host))
    kernels = metal if which == "kernels" else twin_state_kernels()

    def over_slots(parts, x, others):
        """One call of the mixer; `others` are the states that can't lie in slots."""
        tensors = [
            other if kind is None else SlotStates(pool.update, parts, kernels)
            for kind, pool, other in zip(kinds, pools, others, strict=True)
        ]
        y, left = _run(mixer, x, tensors)
        for number, kind in enumerate(kinds):
            assert kind is None or left[number] is tensors[number]
        return y, left

    kept = []
    for index, prompt in enumerate(prompts):
        offsets = np.array([0, len(prompt)], np.int32)
        rows = StateRows(offsets, _SLOTS[index : index + 1], np.array([True]))
        y, left = over_slots([(0, len(prompt), rows)], prompt[None], [None] * len(kinds))
        assert mx.abs(y[0] - alone[index][0]).max() < 1e-5
        kept.append(left)
    others = [mx.concatenate([left[i] for left in kept]) if kind is None else None for i, kind in enumerate(kinds)]
    rows = StateRows(np.arange(4, dtype=np.int32), _SLOTS, np.zeros(3, np.bool_))
    y, _ = over_slots([(0, 3, rows)], mx.stack(then), others)
    assert mx.abs(y - mx.stack([second for _, second, _ in alone])).max() < 1e-5
    assert len(host.records) == (4 * sum(kind is not None for kind in kinds) if which == "kernels" else 0)


def test_decode_rows_and_prefills_of_a_step_are_launched_apart():
    """Two parts over one pool give what each gives alone, and the second comes after the first."""
    shape = GatedDeltaShape(1, 2, 32, 8, mx.float32)
    inputs, launched = shape.inputs(6, seed=1), []
    rows = [
        StateRows(np.array([0, 1], np.int32), np.array([2], np.int32), np.array([True])),
        StateRows(np.array([0, 3, 5], np.int32), np.array([1, 0], np.int32), np.array([True, True])),
    ]

    def launch(packed, pool, rows, after):
        launched.append((len(packed[0]), after is None))
        return state_twins.gated_delta(*packed, pool, rows, after)

    def run(parts):
        pool = _Pool(mx.zeros((3, *shape.pool[0])))
        return SlotStates(pool.update, parts, twin_state_kernels()).run(launch, inputs), pool.array

    y, pool = run([(0, 1, rows[0]), (1, 6, rows[1])])
    assert launched == [(1, True), (5, False)]
    lengths, slots = np.array([0, 1, 4, 6], np.int32), np.array([2, 1, 0], np.int32)
    together, pool_of_all = run([(0, 6, StateRows(lengths, slots, np.array([True] * 3)))])
    assert mx.allclose(y, together, atol=1e-6)
    assert mx.allclose(pool, pool_of_all, atol=1e-6)


def test_other_states_go_to_mlx_lm_and_masks_are_refused():
    q = k = mx.ones((1, 2, 1, 32))
    v, gate, log = mx.ones((1, 2, 1, 8)), mx.ones((1, 2, 1)), mx.zeros(1)
    y, state = state_updates.gated_delta_update(q, k, v, gate, gate, log, log)
    assert y.shape == v.shape
    assert state.shape == (1, 1, 8, 32)
    x, mix = mx.ones((1, 2, 1, 8)), mx.ones((1, 2, 1, 32))
    y, state = state_updates.ssm_update(x, log, mix, mix, log, gate, log)
    assert y.shape == x.shape
    assert state.shape == (1, 1, 8, 32)
    rows = StateRows(np.array([0, 2], np.int32), np.array([0], np.int32), np.array([True]))
    slots = SlotStates(_Pool(mx.zeros((1, 1, 8, 32))).update, [(0, 2, rows)], twin_state_kernels())
    with pytest.raises(ValueError, match=r"mask of shape \(1, 2\) is given"):
        state_updates.gated_delta_update(q, k, v, gate, gate, log, log, slots, mx.ones((1, 2)))
    with pytest.raises(ValueError, match=r"lengths of shape \(1,\) is given"):
        state_updates.ssm_update(x, log, mix, mix, log, gate, log, slots, lengths=mx.ones(1))
