"""The boundary between pools, moved by hand in either direction."""

from cluster.kv.layout import KVGroup, KVLayout, KVPool
from cluster.kv.memory import PoolResize, PoolSet
from cluster.kv.spec import FullAttentionSpec, RecurrentStateSpec, StateTensor

FULL = FullAttentionSpec(1, 1)
STATE = RecurrentStateSpec("s", (StateTensor((1,), 4),))


def pools_of(num_blocks, num_states, *, spare_bytes=0):
    """Blocks of 10 bytes and states of 25, null blocks included."""
    groups = (KVGroup(0, 0, FULL, (0,), 10), KVGroup(1, 1, STATE, (1,), 25))
    pools = (KVPool(0, 10, (0,), num_blocks), KVPool(1, 25, (1,), num_states))
    return PoolSet(KVLayout(4, groups, pools, 10 * num_blocks + 25 * num_states + spare_bytes, 64))


def test_states_become_blocks_and_blocks_states():
    pools = pools_of(5, 5)
    assert pools.rebalance([6, 0]) == (PoolResize(1, 4), PoolResize(0, 7))
    assert (pools.spare_bytes, pools[0].num_empty, pools[1].num_empty) == (5, 6, 3)
    assert pools.rebalance([0, 4]) == (PoolResize(0, 5), PoolResize(1, 5))
    assert (pools.spare_bytes, pools[0].num_empty, pools[1].num_empty) == (0, 4, 4)


def test_blocks_in_use_beyond_the_new_end_move_to_empty_ones():
    pools = pools_of(8, 2)
    held = pools[0].allocate(7)
    pools[0].free(held[:5])
    shrunk, grown = pools.rebalance([0, 3])
    assert shrunk == PoolResize(0, 3, ((6, 1), (7, 2)))
    assert grown == PoolResize(1, 4)
    assert [pools[0].ref_count(block_id) for block_id in (1, 2)] == [1, 1]


def test_spare_bytes_are_used_first():
    pools = pools_of(5, 5, spare_bytes=20)
    assert pools.rebalance([6, 0]) == (PoolResize(0, 7),)
    assert pools.spare_bytes == 0


def test_what_the_others_need_themselves_is_not_theirs_to_give():
    pools = pools_of(5, 5)
    assert pools.rebalance([7, 4]) is None
    assert pools.rebalance([14, 1]) is None
    assert (pools[0].num_blocks, pools[1].num_blocks) == (5, 5), "nothing has changed"


def test_what_fits_already_moves_nothing():
    pools = pools_of(5, 5)
    assert not pools.lacks([4, 4])
    assert pools.rebalance([4, 4]) == ()


def test_reserved_bytes_count_against_what_fits():
    pools = pools_of(5, 5)
    assert pools.fits([4, 0], reserved_bytes=100)
    assert not pools.fits([4, 0], reserved_bytes=101)
    assert pools.fits([14, 0])
    assert not pools.fits([15, 0])
