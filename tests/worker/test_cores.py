"""How a step uses the cores of a CPU: what is faster wins, whatever the machine does meanwhile."""

import os
import random
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.cores import ROWS_A_LANE, CoreChoice, Cores

SECONDS_A_ROW = 1e-3


class Machine:
    """Steps that take by cores what `speedup` says at the moment. The next is built while one runs."""

    def __init__(self, most: int) -> None:
        self.used: list[int] = []
        self.threads = CoreChoice(most, self.used.append)
        self.taken: list[int] = []
        self._runs: tuple[Cores, float] | None = None

    def run(self, num_rows: int, speedup: float) -> float:
        """One step; `speedup` is that of most cores."""
        cores = self.threads.choose(num_rows)
        if self._runs is not None:
            self.threads.ended(*self._runs)
        self.threads.begin(cores)
        threads = self.used[-1] if self.used else 1
        assert threads == 1 or cores.are_many
        assert not (threads > 1 and cores.has_lanes)
        self.taken.append(2 if cores.are_many else 1)
        run_s = (num_rows + 24) * SECONDS_A_ROW / (speedup if cores.are_many else 1.0)
        self._runs = cores, run_s
        return run_s


def test_with_one_thread_there_is_nothing_to_choose():
    machine = Machine(1)
    assert [machine.run(8, 2.0) for _ in range(9)] == [0.032] * 9
    assert machine.used == []


@pytest.mark.parametrize(("speedup", "best"), [(1.8, 2), (0.4, 1)])
def test_what_is_faster_is_used_and_the_rest_tried_ever_less_often(speedup, best):
    machine = Machine(2)
    for _ in range(1200):
        machine.run(8, speedup)
    others = [place for place, taken in enumerate(machine.taken) if taken != best]
    # The first steps, and then after 4, 8, 16 and so on.
    assert len(others) < 12
    assert not [place for place in others if 700 < place < 1000]


def test_a_core_that_is_taken_away_and_given_back_is_noticed():
    machine = Machine(2)
    for speedup, best in ((1.8, 2), (0.4, 1), (1.8, 2)):
        for _ in range(1100):
            machine.run(300, speedup)
        assert machine.taken[-40:].count(best) >= 39


def test_sizes_are_judged_apart():
    """Small steps may lose by what large ones gain."""
    machine = Machine(2)
    for _ in range(300):
        machine.run(1, 0.8)
        machine.run(300, 1.8)
    assert machine.taken[-20::2] == [1] * 10
    assert machine.taken[-19::2] == [2] * 10


@pytest.mark.parametrize("most", [2, 4])
def test_many_rows_run_in_lanes_and_fewer_with_threads(most):
    used: list[int] = []
    threads = CoreChoice(most, used.append)
    enough = ROWS_A_LANE * most
    for num_rows, allowed in ((enough, True), (enough - 1, True), (enough, False)):
        # One core is tried first.
        threads.ended(threads.choose(num_rows, allows_lanes=allowed), 5.0)
    for num_rows, allowed, has_lanes in ((enough, True, True), (enough - 1, True, False), (enough, False, False)):
        cores = threads.choose(num_rows, allows_lanes=allowed)
        assert cores.are_many
        assert cores.has_lanes == has_lanes
        threads.begin(cores)
        threads.ended(cores, 1.0)
    assert used == [1, most]


def test_what_lanes_gain_and_what_threads_lose_is_judged_apart():
    threads = CoreChoice(2, lambda num: None)
    for _ in range(300):
        for allowed, speedup in ((True, 1.8), (False, 0.5)):
            cores = threads.choose(200, allows_lanes=allowed)
            threads.ended(cores, 1.0 / speedup if cores.are_many else 1.0)
    assert threads.choose(200).has_lanes
    assert not threads.choose(200, allows_lanes=False).are_many


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**16), speedup=st.sampled_from([0.3, 0.7, 1.4, 1.9]))
def test_steps_of_any_size_that_are_held_up_now_and_then_take_little_longer_than_need_be(seed, speedup):
    rng = random.Random(seed)
    machine, total, least = Machine(2), 0.0, 0.0
    for _ in range(2000):
        num_rows = rng.choice((1, 8, 16, 200, 370, 500))
        held_up = 4.0 if rng.random() < 0.02 else rng.uniform(0.95, 1.05)
        run_s = machine.run(num_rows, speedup * held_up if speedup > 1 else speedup / held_up)
        total += run_s
        least += (num_rows + 24) * SECONDS_A_ROW / max(1.0, speedup)
    assert total < 1.25 * least


@pytest.mark.skipif(sys.platform != "linux", reason="a Mac has its own BLAS")
def test_openblas_takes_the_number_and_refuses_more_than_it_began_with():
    code = """
from worker import blas
import ctypes
blas.load(2)
assert blas.most_threads() == 2
blas.use_threads(1)
assert ctypes.CDLL(None).openblas_get_num_threads() == 1
assert blas.most_threads() == 2
blas.use_threads(2)
assert ctypes.CDLL(None).openblas_get_num_threads() == 2
try:
    blas.use_threads(3)
except ValueError as error:
    print(error)
"""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OPENBLAS")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout == "num_threads is 3; it must be from 1 to 2\n"
    assert done.stderr == ""
