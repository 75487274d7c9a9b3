"""Whatever takes a token waits for it: each launch over a pool has it among its inputs, each gather in its index."""

import importlib
import inspect
import io
import pkgutil
import re
from collections.abc import Callable
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np
import pytest

import worker.metal
from tests.worker.metal.state_data import rows_of
from worker.batch import DecodeGroup
from worker.metal.decode_plan import plan_decode, seen_ranges
from worker.metal.gated_delta import GatedDelta
from worker.metal.mamba2 import Mamba2
from worker.metal.paged_decode import PagedDecode
from worker.metal.paged_prefill import PagedPrefill
from worker.metal.prefill import Prefill
from worker.metal.prefill_rows import PrefillOptions, PrefillRows
from worker.metal.quantized import WriteQuantized, zero_pool
from worker.metal.short_conv import ShortConv
from worker.metal.write_kv import PutBlocks, WriteKV, move_blocks

_F16 = mx.float16


@dataclass
class _Launches:
    """A `metal_kernel` that runs nothing and keeps what each launch was given."""

    token: mx.array = field(default_factory=lambda: mx.array([5], mx.int32))
    pools: list[mx.array] = field(default_factory=list)
    given: list[tuple[str, list[mx.array]]] = field(default_factory=list)

    def __call__(self, *, name, **_):
        def launch(*, inputs, output_shapes, output_dtypes, **_):
            self.given.append((name, list(inputs)))
            return [mx.zeros(shape, dtype) for shape, dtype in zip(output_shapes, output_dtypes, strict=True)]

        return launch

    def pool(self, *shape, dtype=_F16) -> mx.array:
        self.pools.append(mx.zeros(shape, dtype))
        return self.pools[-1]

    def packed(self, *shape):
        pool = zero_pool(shape, _F16, 8, 32)
        self.pools += [pool.packed, pool.scales, pool.biases]
        return pool


def _decode(kernels, *, is_latent=False, heads=4, dim=64, bits=0, by_group=False):
    pools = [(kernels.packed if bits else kernels.pool)(3, 1, 16, dim) for _ in range(1 if is_latent else 2)]
    queries, table, lens = mx.zeros((1, heads, 1, dim), _F16), np.array([[1, 2]], np.int32), np.array([20], np.int32)
    decode, after = PagedDecode(kernels), {"after": kernels.token}
    group = DecodeGroup(0, 1, table, lens, 0)
    plan = plan_decode(table, seen_ranges([20]), 1)
    if is_latent:
        run, what = (decode.decode_latent, group) if by_group else (decode.attend_latent, plan)
        return run(queries, *pools, 32, what, 1.0, **after)
    run, what = (decode, group) if by_group else (decode.attend, plan)
    return run(queries, *pools, what, 1, 1.0, **after)


def _prefill(kernels, *, is_latent=False, dim=64, bits=0, by=PagedPrefill):
    pools = [(kernels.packed if bits else kernels.pool)(4, 1, 16, dim) for _ in range(1 if is_latent else 2)]
    # A long sequence and a short one.
    queries, rows = mx.zeros((30, 64, dim), _F16), PrefillRows([0, 28, 30], [28, 18], [[0, 1], [2, 3]])
    rest = rows, PrefillOptions(1.0), kernels.token
    run = by(kernels) if by is PagedPrefill else by
    return run.latent(queries, *pools, 32, *rest) if is_latent else run(queries, *pools, *rest)


def _by_both_ways(kernels, *, is_latent=False):
    out = _prefill(kernels, is_latent=is_latent, by=Prefill(PagedPrefill(kernels)))
    assert len(kernels.given) == 1, "the other sequence is gathered"
    return out


def _twin(kernels, *, bits=0):
    return _prefill(kernels, bits=bits, by=Prefill())


def _latent_twin(kernels, *, bits=0):
    return _prefill(kernels, bits=bits, is_latent=True, by=Prefill())


def _gated_delta(kernels, *, lengths=(1, 1), key_dim=64):
    rows = rows_of(lengths)
    n = rows.num_rows
    pool = kernels.pool(6, 2, 16, key_dim, dtype=mx.float32)
    queries, values, gates = mx.zeros((n, 2, key_dim)), mx.zeros((n, 2, 16)), mx.zeros((n, 2))
    return GatedDelta(kernels)(queries, queries, values, gates, gates, pool, rows, kernels.token)


def _mamba2(kernels, *, lengths=(1, 1)):
    rows = rows_of(lengths)
    n, head = rows.num_rows, mx.zeros(2)
    pool, b = kernels.pool(6, 2, 16, 64, dtype=mx.float32), mx.zeros((n, 1, 64))
    x, dt = mx.zeros((n, 2, 16)), mx.zeros((n, 2))
    run = Mamba2(kernels)
    return run(x, head, b, b, head, dt, head, pool, rows, kernels.token, time_step_limit=(0.0, 1.0))


def _short_conv(kernels, *, lengths=(1, 1)):
    rows = rows_of(lengths)
    pool, inputs = kernels.pool(6, 3, 24, dtype=mx.float32), mx.zeros((rows.num_rows, 24))
    return ShortConv(kernels)(inputs, mx.zeros((24, 4, 1)), None, pool, rows, kernels.token, silu=True)


def _write(kernels):
    rows, slots = mx.zeros((2, 1, 64), _F16), mx.array([0, 1], mx.int32)
    return WriteKV(kernels)(rows, rows, slots, kernels.pool(3, 1, 16, 64), kernels.pool(3, 1, 16, 64), kernels.token)


def _quantize(kernels):
    rows, slots = mx.zeros((2, 1, 64), _F16), mx.array([0, 1], mx.int32)
    return WriteQuantized(kernels)(rows, slots, kernels.packed(3, 1, 16, 64), kernels.token)


def _put(kernels):
    return PutBlocks(kernels)(mx.ones((1, 8)), mx.array([2]), kernels.pool(4, 8, dtype=mx.float32), kernels.token)


def _move(kernels):
    ids = mx.array([1, 2], mx.int32)
    return move_blocks(PutBlocks(kernels), kernels.pool(4, 8, dtype=mx.float32), ids, ids, kernels.token)


# Every public entry of `worker.metal` that takes a token, by module and name; several ways through some.
_ENTRIES: dict[str, list[tuple[Callable, dict]]] = {
    "paged_decode.PagedDecode.__call__": [(_decode, {"by_group": True})],
    "paged_decode.PagedDecode.attend": [(_decode, {}), (_decode, {"heads": 20}), (_decode, {"bits": 8})],
    "paged_decode.PagedDecode.decode_latent": [(_decode, {"is_latent": True, "by_group": True})],
    "paged_decode.PagedDecode.attend_latent": [
        (_decode, {"is_latent": True}),
        (_decode, {"is_latent": True, "bits": 8}),
    ],
    "paged_prefill.PagedPrefill.__call__": [(_prefill, {}), (_prefill, {"dim": 256}), (_prefill, {"bits": 8})],
    "paged_prefill.PagedPrefill.latent": [
        (_prefill, {"is_latent": True}),
        (_prefill, {"is_latent": True, "bits": 8}),
    ],
    "prefill.Prefill.__call__": [(_by_both_ways, {})],
    "prefill.Prefill.latent": [(_by_both_ways, {"is_latent": True})],
    "prefill.twin": [(_twin, {}), (_twin, {"bits": 8})],
    "prefill.latent_twin": [(_latent_twin, {}), (_latent_twin, {"bits": 8})],
    "gated_delta.GatedDelta.__call__": [
        (_gated_delta, {}),
        (_gated_delta, {"key_dim": 96}),
        (_gated_delta, {"lengths": (3, 40)}),
    ],
    "mamba2.Mamba2.__call__": [(_mamba2, {}), (_mamba2, {"lengths": (3, 40)})],
    "short_conv.ShortConv.__call__": [(_short_conv, {}), (_short_conv, {"lengths": (3, 40)})],
    "write_kv.WriteKV.__call__": [(_write, {})],
    "write_kv.PutBlocks.__call__": [(_put, {})],
    "write_kv.move_blocks": [(_move, {})],
    "quantized.WriteQuantized.__call__": [(_quantize, {})],
}
# Which take it for the signature's sake: no pool is written in place where they run. The last only hand it on.
_NEEDS_NONE = ("decode_twins.", "state_twins.", "write_kv.nothing_if", "state_rows.token_or_none")


def _takers() -> set[str]:
    """Public functions and methods of `worker.metal` with a parameter `after`."""
    found = set()
    for info in pkgutil.iter_modules(worker.metal.__path__):
        module = importlib.import_module(f"worker.metal.{info.name}")
        for name, entry in vars(module).items():
            if name.startswith("_") or getattr(entry, "__module__", "") != module.__name__:
                continue
            functions = {name: entry}
            if inspect.isclass(entry):
                methods = inspect.getmembers(entry, inspect.isfunction)
                functions = {f"{name}.{key}": x for key, x in methods if key == "__call__" or not key.startswith("_")}
            for key, function in functions.items():
                if inspect.isfunction(function) and "after" in inspect.signature(function).parameters:
                    found.add(f"{info.name}.{key}")
    return found


def test_no_entry_that_takes_a_token_is_missing_here():
    assert {name for name in _takers() if not name.startswith(_NEEDS_NONE)} == _ENTRIES.keys()


def _uses(array: mx.array, kernels: _Launches) -> dict[str, bool]:
    """Operations below `array` that use a pool as it is, and whether each comes after the token."""
    if any(array is pool for pool in kernels.pools):
        return {}
    text = io.StringIO()
    names = {f"pool{index}": pool for index, pool in enumerate(kernels.pools)}
    mx.export_to_dot(text, array, token=kernels.token, **names)
    inputs: dict[str, set[str]] = {}
    for source, target in re.findall(r'^("\w+"|\d+) -> ("\w+"|\d+)', text.getvalue(), re.MULTILINE):
        inputs.setdefault(target, set()).add(source)

    def below(node: str) -> set[str]:
        return {node}.union(*map(below, inputs.get(node, ())))

    users = [node for node, sources in inputs.items() if any(source.startswith('"pool') for source in sources)]
    return {node: '"token"' in below(node) for node in users}


@pytest.mark.parametrize("name", _ENTRIES)
def test_every_launch_and_gather_over_a_pool_waits_for_the_token(name):
    for entry, options in _ENTRIES[name]:
        kernels = _Launches()
        result = entry(kernels, **options)
        waits = {}
        for kernel, inputs in kernels.given:
            if any(array is pool for array in inputs for pool in kernels.pools):
                waits[kernel] = any(array is kernels.token for array in inputs)
            for array in inputs:
                waits |= {f"an input of {kernel}: {use}": is_late for use, is_late in _uses(array, kernels).items()}
        for array in result if isinstance(result, tuple) else (result,):
            waits |= _uses(array, kernels)
        assert waits, "no pool was touched"
        assert all(waits.values()), f"{options}: {waits}"
