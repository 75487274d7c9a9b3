"""What the machine has, what MLX is told of it, and that weights are in memory once."""

import json
import os
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest

from worker import machine

_GIB = 1 << 30
_WEIGHTS = """
import resource, sys
from worker import blas
blas.load()
import mlx.core as mx
import mlx_lm.models.llama
from worker import machine, models

def most():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

machine.prepare()
mx.eval(mx.zeros((4, 4)) @ mx.zeros((4, 4)))
before = most()
loaded = models.load(sys.argv[1], dtype=sys.argv[2])
print(loaded.weights_bytes, most() - before, mx.get_active_memory(), mx.get_peak_memory())
"""


@pytest.fixture
def mac(monkeypatch):
    """A Mac of 64 GiB, as far as MLX tells; what it is told comes back."""
    told: dict[str, int] = {}
    device = {"memory_size": 64 * _GIB, "max_recommended_working_set_size": 48 * _GIB}
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "device_info", lambda: device)
    for name in ("set_cache_limit", "set_memory_limit", "set_wired_limit"):
        monkeypatch.setattr(mx, name, lambda limit, name=name: told.update({name: limit}))
    return device, told


def test_on_a_mac_everything_is_bound_to_the_working_set(mac):
    _, told = mac
    assert machine.memory_limit_bytes() == 48 * _GIB
    machine.prepare()
    assert told == {"set_cache_limit": _GIB, "set_memory_limit": 48 * _GIB, "set_wired_limit": 48 * _GIB}


def test_on_a_small_mac_few_freed_buffers_are_kept_and_the_system_has_a_part(mac):
    """The owner has raised the working set to all there is."""
    device, told = mac
    device |= {"memory_size": 8 * _GIB, "max_recommended_working_set_size": 8 * _GIB}
    machine.prepare()
    assert told == {"set_cache_limit": _GIB // 2, "set_memory_limit": 8 * _GIB, "set_wired_limit": 7 * _GIB}


@pytest.mark.skipif(mx.metal.is_available(), reason="needs a machine without Metal")
@pytest.mark.parametrize(("text", "limit"), [("max", None), (f"{2 * _GIB}\n", 2 * _GIB), (None, None)])
def test_without_metal_a_container_counts(monkeypatch, tmp_path, text, limit):
    file = tmp_path / "memory.max"
    if text is not None:
        file.write_text(text)
    monkeypatch.setattr(machine, "_CGROUP_LIMIT", file)
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert machine.memory_limit_bytes() == min(total, limit or total)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """112 MiB of float16, of which no tensor has more than a fifth."""
    folder = tmp_path_factory.mktemp("model")
    width, inner, layers, vocab = 512, 2048, 12, 12_000
    config = {
        "model_type": "llama",
        "hidden_size": width,
        "num_hidden_layers": layers,
        "intermediate_size": inner,
        "num_attention_heads": 8,
        "rms_norm_eps": 1e-5,
        "vocab_size": vocab,
        "tie_word_embeddings": True,
    }
    shapes = {"model.embed_tokens.weight": (vocab, width), "model.norm.weight": (width,)}
    for layer in range(layers):
        shapes |= {f"model.layers.{layer}.self_attn.{name}_proj.weight": (width, width) for name in "qkvo"}
        shapes |= {f"model.layers.{layer}.mlp.{name}_proj.weight": (inner, width) for name in ("gate", "up")}
        shapes[f"model.layers.{layer}.mlp.down_proj.weight"] = (width, inner)
        for name in ("input", "post_attention"):
            shapes[f"model.layers.{layer}.{name}_layernorm.weight"] = (width,)
    weights = {name: mx.full(shape, 0.01, mx.float16) for name, shape in shapes.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(("dtype", "most"), [("float16", 1.25), ("float32", 1.5)])
def test_weights_are_in_memory_once(folder, dtype, most):
    """Read tensor by tensor, each into the array that stays; converted, each is there twice for a moment."""
    child = subprocess.run(
        [sys.executable, "-c", _WEIGHTS, str(folder), dtype],
        cwd=Path(__file__).resolve().parents[2],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    weights, resident, active, peak = map(int, child.stdout.split())
    assert weights > 100 << 20
    assert active <= 1.01 * weights
    assert peak <= most * weights
    assert resident <= most * weights + (24 << 20)
