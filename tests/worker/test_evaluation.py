"""Graphs evaluated beside: what comes of them, of failures and of the end of the process."""

import subprocess
import sys
import threading

import mlx.core as mx
import pytest

from worker import cpu_math
from worker.evaluation import Inline, beside

pytestmark = pytest.mark.skipif(not cpu_math.is_available(), reason="streams of a CPU's default device are needed")


def _product(evaluator):
    with evaluator.building():
        return mx.ones((8, 8)) @ mx.full((8, 8), 2.0)


@pytest.mark.parametrize("make", [Inline, beside])
def test_what_was_built_is_computed_and_can_be_read_anywhere(make):
    evaluator = make()
    array = _product(evaluator)
    evaluator.start([array])
    evaluator.wait()
    evaluator.wait()
    assert array.tolist() == [[16.0] * 8] * 8
    # What was evaluated goes into graphs of other streams.
    assert (array + 1).sum().item() == 17 * 64


def test_starting_does_not_wait_and_waiting_does(monkeypatch):
    evaluator, may_go_on, evaluate = beside(), threading.Event(), mx.eval

    def held_up(*arrays):
        assert may_go_on.wait(10)
        evaluate(*arrays)

    monkeypatch.setattr(mx, "eval", held_up)
    array = _product(evaluator)
    evaluator.start([array])
    # Another graph is built meanwhile.
    other = _product(evaluator)
    may_go_on.set()
    evaluator.start([other])
    assert array[0, 0].item() == 16
    evaluator.wait()
    assert other[0, 0].item() == 16


def test_a_failure_comes_to_whoever_waits_and_only_once(monkeypatch):
    evaluator = beside()
    with monkeypatch.context() as patch:

        def fail(*arrays):
            raise RuntimeError("out of memory")

        patch.setattr(mx, "eval", fail)
        evaluator.start([])
        with pytest.raises(RuntimeError, match="out of memory"):
            evaluator.wait()
        evaluator.start([])
        with pytest.raises(RuntimeError, match="out of memory"):
            evaluator.start([])
        evaluator.start([])
        evaluator.abandon()
    evaluator.wait()
    array = _product(evaluator)
    evaluator.start([array])
    evaluator.wait()
    assert array[0, 0].item() == 16


def test_nobody_else_holds_what_is_evaluated():
    """A pool's readers are found by references to it: none may come or go on another thread."""
    evaluator = beside()
    array = _product(evaluator)
    evaluator.start([array])
    during = sys.getrefcount(array)
    evaluator.wait()
    assert sys.getrefcount(array) == during - 1
    del array


def test_more_streams_are_the_same_whoever_asks_and_compute_in_parallel_parts():
    evaluator = beside()
    first, second = evaluator.streams(2)
    assert evaluator.streams(1) == [first]
    with evaluator.building():
        x = mx.arange(4.0)
        with mx.stream(first):
            one = x + 1
        with mx.stream(second):
            other = x * 2
        both = one + other
    evaluator.start([both])
    evaluator.wait()
    assert both.tolist() == [1.0, 4.0, 7.0, 10.0]


_INTERRUPTED = """
import signal
signal.signal(signal.SIGALRM, lambda *_: exit(3))
signal.setitimer(signal.ITIMER_REAL, 0.002)
evaluator.wait()
signal.pause()
"""


@pytest.mark.parametrize("ends", ["evaluator.wait()", "", "raise SystemExit(3)", _INTERRUPTED])
def test_a_process_ends_cleanly_whatever_runs(ends):
    script = f"""
import mlx.core as mx
from worker.evaluation import beside
evaluator = beside()
with evaluator.building():
    x = mx.ones((256, 256))
    for _ in range(300):
        x = (x @ x) * 1e-3
evaluator.start([x])
{ends}
"""
    child = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert child.returncode == (3 if "3" in ends else 0), child.stderr
    assert not child.stderr
