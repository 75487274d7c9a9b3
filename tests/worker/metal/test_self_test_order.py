"""The chain of the in-place family on a GPU that takes liberties: who waits for no write reads what was before it."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.msl_host.host import MslHost
from tests.msl_host.require import require_toolchain
from worker.metal import self_test_cases
from worker.metal.decode_checks import LatentNeeds
from worker.metal.paged_decode import PagedDecode
from worker.metal.paged_prefill import PagedPrefill
from worker.metal.self_test import AttentionNeeds, run
from worker.metal.self_test_cases import IN_PLACE

_F32 = mx.float32
_NEEDS = [AttentionNeeds(4, 2, 64, _F32), LatentNeeds(3, 64, 32, _F32)]
_READERS = ("cidery_paged_decode", "cidery_paged_prefill")
_WRITERS = ("cidery_write_kv", "cidery_put_blocks")


@pytest.fixture(autouse=True)
def _short_chain(monkeypatch):
    require_toolchain()
    monkeypatch.setattr(self_test_cases, "_CHAIN_STEPS", 5)


class Eager:
    """The harness, but a reader whose `after` is no kernel's output sees pools as they were before their last write."""

    def __init__(self) -> None:
        self._host = MslHost()
        # By address, as pools are seen in several shapes: the pool, and what was in it.
        self._before: dict[int, tuple[mx.array, mx.array]] = {}
        self._outputs: dict[int, mx.array] = {}
        self.num_early = 0

    def __call__(self, *, name: str, input_names: list[str], **kernel: Any) -> Any:
        run_kernel = self._host(name=name, input_names=input_names, **kernel)

        def launch(*, inputs: list[mx.array], **call: Any) -> list[mx.array]:
            pools = [number for number, of in enumerate(input_names) if of.endswith("pool")]
            after = inputs[input_names.index("after")] if "after" in input_names else None
            inputs = list(inputs)
            for number in pools:
                pool, before = inputs[number], self._before.get(_address(inputs[number]))
                if name.startswith(_WRITERS):
                    # The pool is kept, so that no other array has its address.
                    self._before[_address(pool)] = pool, mx.array(np.array(pool))
                elif name.startswith(_READERS) and before is not None and id(after) not in self._outputs:
                    self.num_early += 1
                    inputs[number] = before[1].reshape(pool.shape)
            outputs = run_kernel(inputs=inputs, **call)
            self._outputs |= {id(output): output for output in outputs}
            return outputs

        return launch


def _address(array: mx.array) -> int:
    return int(np.array(array, copy=False).ctypes.data)


def _without_token(method: Any) -> Any:
    def call(*arguments: Any, after: Any = None, **options: Any) -> Any:
        return method(*arguments, **options)

    return call


def test_every_reader_of_the_chain_waits_for_its_write():
    host = Eager()
    assert run([IN_PLACE], _NEEDS, host).failures == {}
    assert host.num_early == 0


@pytest.mark.parametrize(
    ("kernel", "method", "need"),
    [(PagedDecode, "attend", _NEEDS[0]), (PagedDecode, "attend_latent", _NEEDS[1])],
)
def test_a_token_dropped_in_decode_is_found(monkeypatch, kernel, method, need):
    monkeypatch.setattr(kernel, method, _without_token(getattr(kernel, method)))
    host = Eager()
    assert "of a chain differs from the same chain by scatter" in run([IN_PLACE], [need], host).failures["in_place"]
    assert host.num_early


@pytest.mark.parametrize(("method", "need"), [("__call__", _NEEDS[0]), ("latent", _NEEDS[1])])
def test_a_token_dropped_in_prefill_is_found(monkeypatch, method, need):
    original = getattr(PagedPrefill, method)

    def call(self: PagedPrefill, *arguments: Any) -> mx.array:
        return original(self, *arguments[:-1])

    monkeypatch.setattr(PagedPrefill, method, call)
    host = Eager()
    assert "of a chain differs from the same chain by scatter" in run([IN_PLACE], [need], host).failures["in_place"]
    assert host.num_early
