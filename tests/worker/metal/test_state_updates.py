"""mlx-lm's own mixers, unmodified, with their recurrent states in slots; the kernels run on the harness."""

import importlib

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import ArraysCache

from tests.msl_host.host import MslHost
from tests.msl_host.require import require_toolchain
from worker.metal import state_updates
from worker.metal.gated_delta import GatedDelta
from worker.metal.mamba2 import Mamba2
from worker.metal.short_conv import ShortConv
from worker.metal.state_kernels import StateKernels, twin_state_kernels
from worker.metal.state_rows import StateRows
from worker.metal.state_updates import SlotStates

_LENGTHS = (7, 1, 12)
_SLOTS = np.array([4, 1, 2], np.int32)


def _qwen3_next(module):
    sizes = {"num_key_heads": 2, "num_value_heads": 4, "key_head_dim": 64, "value_head_dim": 32, "conv_kernel_dim": 4}
    fields = dict.fromkeys(module.ModelArgs.__dataclass_fields__, 1)
    args = module.ModelArgs(**{**fields, "hidden_size": 32, **{f"linear_{name}": of for name, of in sizes.items()}})
    return module.Qwen3NextGatedDeltaNet(args)


def _kimi_linear(module):
    fields = dict.fromkeys(module.ModelArgs.__dataclass_fields__, 1)
    attention = {"num_heads": 2, "head_dim": 32, "short_conv_kernel_size": 4}
    args = module.ModelArgs(**{**fields, "hidden_size": 32, "linear_attn_config": attention})
    return module.KimiDeltaAttention(args, 0)


def _nemotron_h(module):
    fields = dict.fromkeys(module.ModelArgs.__dataclass_fields__, 1)
    sizes = {"mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 64, "n_groups": 2, "conv_kernel": 4}
    limit = {"time_step_limit": (0.0, float("inf")), "hybrid_override_pattern": "M"}
    return module.NemotronHMamba2Mixer(module.ModelArgs(**{**fields, "hidden_size": 32, **sizes, **limit}))


# What makes the mixer, how many tensors its cache has, and which of them is the recurrent state.
_MIXERS = {"qwen3_next": (_qwen3_next, 2, 1), "kimi_linear": (_kimi_linear, 4, 3), "nemotron_h": (_nemotron_h, 2, 1)}


def _run(mixer, x, tensors):
    """The outputs, and what the mixer left in its cache."""
    cache = ArraysCache(size=len(tensors))
    cache.cache[:] = tensors
    return mixer(x, mask=None, cache=cache), cache.cache


def _alone(mixer, prompt, then, num_tensors):
    first, tensors = _run(mixer, prompt[None], [None] * num_tensors)
    second, _ = _run(mixer, then[None], tensors)
    return first[0], second[0], tensors


@pytest.mark.parametrize("name", _MIXERS)
@pytest.mark.parametrize("which", ["kernels", "twins"])
def test_mixers_of_mlx_lm_run_over_slots(monkeypatch, name, which):
    """Prefills by themselves, then a decode row of each together: what each sequence gets alone."""
    require_toolchain()
    make, num_tensors, at = _MIXERS[name]
    module = importlib.import_module(f"mlx_lm.models.{name}")
    for update in ("gated_delta_update", "ssm_update"):
        if hasattr(module, update):
            monkeypatch.setattr(module, update, getattr(module, update))
    mx.random.seed(3)
    mixer = make(module)
    prompts = [mx.random.normal((length, 32)) for length in _LENGTHS]
    then = [mx.random.normal((1, 32)) for _ in _LENGTHS]
    alone = [_alone(mixer, prompt, row, num_tensors) for prompt, row in zip(prompts, then, strict=True)]
    pool = mx.full((6, *alone[0][2][at].shape[1:]), float("nan"))
    mx.eval(pool)

    host = MslHost()
    metal = StateKernels("host", GatedDelta(host), Mamba2(host), ShortConv(host))
    kernels = metal if which == "kernels" else twin_state_kernels()
    state_updates.install(module)
    token, left = None, []
    for index, prompt in enumerate(prompts):
        offsets = np.array([0, len(prompt)], np.int32)
        states = SlotStates(pool, StateRows(offsets, _SLOTS[index : index + 1], np.array([True])), kernels, token)
        tensors = [None] * num_tensors
        tensors[at] = states
        y, tensors = _run(mixer, prompt[None], tensors)
        assert tensors[at] is states
        token = states.token
        assert mx.abs(y[0] - alone[index][0]).max() < 1e-5
        left.append(tensors)
    rows = StateRows(np.arange(4, dtype=np.int32), _SLOTS, np.zeros(3, np.bool_))
    tensors = [
        SlotStates(pool, rows, kernels, token)
        if number == at
        else mx.concatenate([tensors[number] for tensors in left])
        for number in range(num_tensors)
    ]
    y, _ = _run(mixer, mx.stack(then), tensors)
    assert mx.abs(y - mx.stack([second for _, second, _ in alone])).max() < 1e-5
    if which == "kernels":
        assert len(host.records) == 4


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
    slots = SlotStates(mx.zeros((1, 1, 8, 32)), rows, twin_state_kernels())
    with pytest.raises(ValueError, match=r"mask of shape \(1, 2\) is given"):
        state_updates.gated_delta_update(q, k, v, gate, gate, log, log, slots, mx.ones((1, 2)))
    with pytest.raises(ValueError, match=r"lengths of shape \(1,\) is given"):
        state_updates.ssm_update(x, log, mix, mix, log, gate, log, slots, lengths=mx.ones(1))
