"""A conversation counts once on its Mac, at its present length, while it is spoken in."""

import pytest

from cluster.kv.hashing import BlockHash
from cluster.routing.hot_set import HotSets


def chain(length: int, start: int = 0) -> list[BlockHash]:
    return [BlockHash((start + number).to_bytes(16, "big")) for number in range(length)]


@pytest.fixture
def hot() -> HotSets:
    hot = HotSets(horizon_s=10.0)
    hot.add_slot()
    hot.add_slot()
    return hot


def test_a_turn_takes_over_what_the_one_before_left(hot: HotSets) -> None:
    hot.touch(0, chain(10), 0, 0.0)
    hot.touch(0, chain(15), 12, 5.0)
    hot.check()
    assert hot.num_blocks == [15, 0]
    hot.expire(0, 12.0)
    assert hot.num_blocks == [15, 0], "the first turn's silence doesn't count"
    hot.expire(0, 15.1)
    assert hot.num_blocks == [0, 0]


def test_what_another_request_brought_counts_there(hot: HotSets) -> None:
    shared = chain(20)
    hot.touch(0, [*shared, *chain(5, 100)], 0, 0.0)
    hot.touch(0, [*shared, *chain(7, 200)], 20, 0.0)
    hot.check()
    assert hot.num_blocks[0] == 32


def test_the_same_prompt_again_adds_nothing(hot: HotSets) -> None:
    for _ in range(3):
        hot.touch(0, chain(10), 0, 0.0)
        hot.touch(0, chain(10), 10, 0.0)
    hot.check()
    assert hot.num_blocks[0] == 10


def test_macs_are_apart_and_end(hot: HotSets) -> None:
    hot.touch(0, chain(10), 0, 0.0)
    hot.touch(1, chain(10), 0, 0.0)
    hot.touch(1, [], 0, 0.0)
    hot.clear(0)
    hot.check()
    assert hot.num_blocks == [0, 10]
