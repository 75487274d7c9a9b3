"""Tables of few entries are padded for kernels, which then have one variant; nothing is run for what was added."""

import mlx.core as mx
import numpy as np
import pytest

from tests.msl_host.host import MslHost
from tests.msl_host.require import require_toolchain
from tests.worker.metal.state_data import rows_of
from worker.metal.in_place_writer import InPlaceWriter
from worker.metal.pool_writer import Slots, padded_ids
from worker.metal.scatter_writer import ScatterWriter
from worker.metal.short_conv import ShortConv


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9])
def test_ids_end_in_such_that_go_nowhere(count):
    ids = list(range(10, 10 + count))
    assert padded_ids(ids).tolist() == ids + [-1] * max(8 - count, 0)
    slots = Slots(ids)
    assert (slots.num_rows, slots.array.tolist()) == (count, padded_ids(ids).tolist())
    assert slots.by_head(1, 16).tolist() == padded_ids(ids).tolist()


def test_places_by_head_are_padded_as_a_whole():
    assert Slots([33, -1]).by_head(2, 16).tolist() == [65, 81, -1, -1, -1, -1, -1, -1]
    assert len(Slots([0, 1, 2]).by_head(3, 16).tolist()) == 9


@pytest.mark.parametrize("num_rows", [1, 3, 8])
def test_no_thread_is_launched_for_what_was_added(num_rows):
    """And the pools are those that a scatter writes."""
    require_toolchain()
    host, found = MslHost(), []
    for writer in (InPlaceWriter(host), ScatterWriter()):
        pools = [writer.create(name, 4, (2, 16, 8), mx.float32) for name in "kv"]
        rows = mx.random.normal((num_rows, 2, 8), key=mx.random.key(1))
        writer.write(pools, [rows, -rows], Slots(range(5, 5 + num_rows)))
        writer.move(pools, [0, 1], [2, 0])
        writer.put(pools[0], mx.ones((1, 2, 16, 8)), [3])
        found.append([np.array(writer.read([pool], lambda pool, after: pool + 0)) for pool in pools])
        writer.commit()
    assert all(np.array_equal(ours, theirs) for ours, theirs in zip(*found, strict=True))
    grids = [record.grid for record in host.records if not record.kernel.startswith("cidery_join")]
    assert grids == [(2, 2, num_rows), (64, 2, 1), (64, 2, 1), (64, 1, 1)]


@pytest.mark.parametrize("lengths", [[1], [40], [1, 1, 1], [33, 1], [1] * 9])
def test_no_state_is_touched_by_what_was_added(lengths):
    require_toolchain()
    rows, host = rows_of(lengths), MslHost()
    count, tile_rows = len(lengths), 1 if rows.is_decode else 32
    assert rows.sequence_array.size >= 8
    assert rows.tile_array(tile_rows).size >= 8
    assert not np.array(rows.sequence_array)[count:].any()
    pool = mx.random.normal((12, 3, 16), key=mx.random.key(0))
    before = np.array(pool)
    inputs = mx.random.normal((rows.num_rows, 16), key=mx.random.key(1))
    mx.eval(ShortConv(host)(inputs, mx.ones((16, 4, 1)), None, pool, rows, silu=False))
    (record,) = host.records
    assert record.grid == (16, sum(-(-length // tile_rows) for length in lengths), 1)
    others = np.setdiff1d(np.arange(12), rows.slots)
    assert np.array_equal(np.array(pool)[others], before[others])
