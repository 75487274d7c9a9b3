"""The block pool, by behaviour; the state machine of the manager checks it after every step."""

import pytest

from cluster.kv.pool import BlockPool


def test_a_pool_of_the_null_block_alone_is_refused():
    with pytest.raises(ValueError, match=r"at least 2 .* got 1"):
        BlockPool(1)


def test_the_null_block_is_never_handed_out_shared_or_freed():
    pool = BlockPool(4)
    assert pool.allocate(3) == [1, 2, 3]
    pool.touch([0, 2])
    pool.free([0, 2])
    assert (pool.num_free, pool.ref_count(0), pool.ref_count(2)) == (0, 0, 1)


def test_no_more_than_is_empty():
    pool = BlockPool(2)
    pool.allocate(1)
    with pytest.raises(AssertionError, match="1 blocks asked for, 0 empty"):
        pool.allocate(1)


def test_what_came_back_goes_out_before_memory_that_was_never_touched():
    pool = BlockPool(10)
    pool.allocate(3)
    pool.free([2])
    assert pool.allocate(2) == [2, 4]


def test_a_cached_block_is_evictable_when_nobody_holds_it_and_empty_when_forgotten():
    pool = BlockPool(3)
    (block,) = pool.allocate(1)
    pool.cache([block])
    assert (pool.num_evictable, pool.num_empty, pool.is_evictable(block)) == (0, 1, False)
    pool.free([block])
    assert (pool.num_evictable, pool.num_empty, pool.is_evictable(block)) == (1, 1, True)
    pool.touch([block])
    assert (pool.num_evictable, pool.num_free) == (0, 1)
    pool.free([block])
    pool.forget([block])
    assert (pool.num_evictable, pool.num_empty, pool.num_cached) == (0, 2, 0)


def test_forgetting_what_somebody_holds_leaves_it_held():
    pool = BlockPool(3)
    (block,) = pool.allocate(1)
    pool.cache([block])
    pool.forget([block])
    assert pool.ref_count(block) == 1
    pool.free([block])
    assert pool.num_empty == 2


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (lambda pool: pool.free([1, 1]), "block 1 was freed more often than taken"),
        (lambda pool: pool.touch([2]), "block 2 is empty and can't be shared"),
        (lambda pool: pool.cache([2]), "block 2 is cached but nobody holds it"),
        (lambda pool: (pool.cache([1]), pool.cache([1])), "block 1 is cached twice"),
        (lambda pool: pool.forget([1]), "block 1 is not cached"),
        (lambda pool: pool.shrink(3), "3 blocks to give up, 2 empty"),
    ],
)
def test_misuse_is_a_bug(action, message):
    pool = BlockPool(4)
    pool.allocate(1)
    with pytest.raises(AssertionError, match=message):
        action(pool)


def test_shrinking_moves_what_lies_beyond_the_new_end():
    pool = BlockPool(8)
    blocks = pool.allocate(6)
    pool.cache(blocks[4:])
    pool.free([1, 3, 5])
    assert pool.shrink(2) == {6: 1}
    assert (pool.num_blocks, pool.ref_count(1), pool.num_empty) == (6, 1, 1)
    pool.check([0, 1, 1, 0, 1, 0], {1: 0, 5: 0})


def test_shrinking_into_memory_that_was_never_used_moves_nothing():
    pool = BlockPool(8)
    pool.allocate(2)
    assert pool.shrink(5) == {}
    pool.grow(3)
    assert pool.allocate(3) == [3, 4, 5]


def test_a_block_moves_to_where_nothing_ever_was():
    pool = BlockPool(4)
    pool.allocate(3)
    pool.free([2])
    pool.grow(2)
    assert pool.shrink(3) == {3: 2}


@pytest.mark.parametrize("damage", ["_refs", "_owners"])
def test_check_finds_what_it_is_for(damage):
    pool = BlockPool(4)
    pool.allocate(2)
    getattr(pool, damage)[1] ^= 1
    with pytest.raises(AssertionError, match="differ"):
        pool.check([0, 1, 1, 0], {})


def test_what_nobody_references_is_counted_by_the_group_whose_content_it_is():
    pool = BlockPool(8, num_groups=2)
    blocks = pool.allocate(3)
    pool.cache(blocks[:1], 0)
    pool.cache(blocks[1:], 1)
    assert [pool.num_evictable_of(group) for group in range(2)] == [0, 0]
    pool.free(blocks)
    assert [pool.num_evictable_of(group) for group in range(2)] == [1, 2]
    pool.touch([2])
    pool.forget([3])
    assert [pool.num_evictable_of(group) for group in range(2)] == [1, 0]
    pool.check([0, 0, 1, 0, 0, 0, 0, 0], {1: 0, 2: 1})
