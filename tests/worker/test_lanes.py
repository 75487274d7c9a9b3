"""Lanes: who runs where, which modules part their rows, and that it changes nothing but the time."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.golden.cases import config_of, make_model
from worker import models
from worker.attention import Step
from worker.evaluation import Inline
from worker.group_rows import GroupRows, RowSpan
from worker.lanes import Lanes, tiles
from worker.metal.dispatch import twin_kernels
from worker.row_lanes import install


def test_there_are_lanes_only_while_a_graph_is_built_and_only_if_there_are_several():
    assert Lanes.now() is None
    with Lanes([]).building(has_rows=False):
        assert Lanes.now() is None
    lanes = Lanes(Inline().streams(2))
    with lanes.building(are_used=False, has_rows=False):
        assert Lanes.now() is None
    with lanes.building(has_rows=True):
        assert Lanes.now() is lanes
        assert lanes.has_rows
    assert Lanes.now() is None
    assert not lanes.has_rows


def streams_of(lanes: Lanes, costs: list[int], products: list[int]) -> list[str]:
    """By run, the stream it was built for."""
    streams: list[str] = []

    def run() -> mx.array:
        streams.append(str(mx.default_stream(mx.cpu)))
        return mx.array(len(streams))

    results = lanes.each([run] * len(costs), costs, products)
    assert [result.item() for result in results] == list(range(1, len(costs) + 1))
    return streams


LANES = Lanes(Inline().streams(2))


@given(st.lists(st.integers(1, 50), max_size=12))
def test_no_lane_is_busier_than_another_by_more_than_one_run(costs):
    streams = streams_of(LANES, costs, [1] * len(costs))
    loads = [sum(cost for cost, at in zip(costs, streams, strict=True) if at == stream) for stream in set(streams)]
    if len(costs) >= LANES.num:
        assert len(loads) == LANES.num
        assert max(loads) - min(loads) <= max(costs)


def test_products_that_get_several_threads_stay_together():
    large = 1 << 19
    here = str(mx.default_stream(mx.cpu))
    streams = streams_of(LANES, [1, 9, 1, 1, 1], [large, 1, large, 1, 1])
    assert streams[0] == streams[2] == here
    assert here not in streams[1:2]
    with LANES.building(has_rows=True):
        assert len(set(streams_of(LANES, [1, 1, 1], [large] * 3))) == 3


def test_tiles_run_in_lanes_only_where_rows_do():
    streams: set[str] = set()

    def run() -> mx.array:
        streams.add(str(mx.default_stream(mx.cpu)))
        return mx.array(0)

    tiles([run] * 3, [1] * 3)
    with LANES.building(has_rows=False):
        tiles([run] * 3, [1] * 3)
    assert len(streams) == 1
    with LANES.building(has_rows=True):
        tiles([run] * 3, [1] * 3)
    assert len(streams) == 3


@pytest.mark.parametrize(
    ("case", "classes"),
    [
        ("llama tied", {"MLP", "Linear"}),
        ("gemma3_text", {"MLP", "Linear"}),
        ("qwen3_moe", {"Qwen3MoeSparseMoeBlock", "MLP", "Linear"}),
        ("qwen3_next", {"Qwen3NextSparseMoeBlock", "Qwen3NextMLP", "Linear"}),
        ("mamba", {"Linear"}),
    ],
)
def test_modules_that_treat_rows_alone_are_found_and_compute_the_same(case, classes):
    loaded = models.adapt(make_model(case), config_of(case))
    models.attach(loaded, Step(twin_kernels()))
    lanes = Lanes(Inline().streams(1))
    tokens = mx.array(np.random.default_rng(0).integers(1, 60, (1, 40)), mx.int32)
    expected = loaded.model(tokens)
    found = install(loaded.model, lanes, [], loaded.vocab_size)
    assert {cls.__name__ for cls in found} == classes
    with lanes.building(has_rows=True):
        parted = loaded.model(tokens)
    assert mx.allclose(parted, expected, rtol=1e-4, atol=1e-4)
    assert mx.array_equal(loaded.model(tokens), expected)


class Mixing(nn.Module):
    """Each row sees the mean of all."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def __call__(self, x: mx.array) -> mx.array:
        return self.inner(x) + x.mean(axis=1, keepdims=True)


class Asking(nn.Module):
    """Takes more than rows."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def __call__(self, x: mx.array, mask: mx.array | None = None) -> mx.array:
        return self.inner(x)


class Toy(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 8)
        self.layers = list(layers)

    def __call__(self, tokens: mx.array, cache: object = None) -> mx.array:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return x


def test_a_module_that_mixes_rows_is_left_alone_and_what_is_in_it_is_not():
    mixing, asking = Mixing(), Asking()
    toy = Toy(mixing, asking, mixing)
    tokens = mx.arange(30)[None]
    expected = toy(tokens)
    lanes = Lanes(Inline().streams(1))
    assert install(toy, lanes, [], 32) == {nn.Linear}
    assert type(mixing) is Mixing
    with lanes.building(has_rows=True):
        assert mx.allclose(toy(tokens), expected, rtol=1e-5, atol=1e-6)
        # Fewer rows than lanes can share; rows without an axis for a batch.
        one = mx.random.normal((1, 8))
        assert mx.allclose(asking.inner(one), nn.Linear.__call__(asking.inner, one), atol=1e-6)
        assert asking.inner(mx.zeros((9, 8))).shape == (9, 8)


@given(lens=st.lists(st.integers(1, 400), min_size=1, max_size=9), num=st.integers(1, 4))
def test_a_group_cut_for_lanes_is_the_group(lens, num):
    spans = [RowSpan(length - 1, length, list(range(1, length // 16 + 2))) for length in sorted(lens)]
    for group in GroupRows(spans, block_size=16, num_decodes=len(spans)).decode_groups:
        pieces = group.cut(num)
        assert len(pieces) == min(num, group.last - group.first)
        assert (pieces[0].first, pieces[-1].last) == (group.first, group.last)
        assert np.array_equal(np.concatenate([piece.block_tables for piece in pieces]), group.block_tables)
        assert np.array_equal(np.concatenate([piece.context_lens for piece in pieces]), group.context_lens)
        assert sum(piece.num_slots for piece in pieces) == group.num_slots
        assert group.cut(num)[0] is pieces[0]
