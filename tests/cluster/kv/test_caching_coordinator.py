"""Registering, states and look-ups, where their order is unusual."""

import pytest

from cluster.kv.events import BlocksRemoved
from cluster.kv.hashing import split_hashes
from cluster.kv.layout import KVGroup, KVLayout, KVPool
from cluster.kv.manager import KVCacheManager
from cluster.kv.points import PointKind
from cluster.kv.spec import SlidingWindowSpec
from tests.cluster.kv.test_manager import FULL, SIZE, STATE, WINDOW, Session, chain, kv_of, tokens_of


def begun(kv, seq_id, tokens, num_run):
    """A sequence of which so many tokens have run and are registered."""
    kv.start(seq_id, kv.get_computed_blocks(chain(tokens), len(tokens)), chain(tokens))
    kv.release_sources()
    advance(kv, seq_id, tokens, 0, num_run)


def advance(kv, seq_id, tokens, start, end):
    assert kv.allocate(seq_id, end, start) is not None
    kv.register(seq_id, start // SIZE, chain(tokens)[start : end // SIZE * SIZE])


class TestCheckpoints:
    def test_a_place_is_kept_once(self):
        kv, tokens = kv_of([FULL, STATE], 1000), tokens_of(0, 100)
        begun(kv, 1, tokens, 32)
        assert len(kv.checkpoint(1, 32, PointKind.HEAD)) == 1
        assert kv.checkpoint(1, 32, PointKind.HEAD) == (), "on its way"
        kv.confirm_checkpoint(1, 32)
        advance(kv, 1, tokens, 32, 48)
        assert len(kv.checkpoint(1, 48, PointKind.TURN_END)) == 1
        kv.confirm_checkpoint(1, 48)
        assert kv.checkpoint(1, 48, PointKind.TURN_END) == (), "its own already"

    def test_a_model_without_states_has_none(self):
        kv, tokens = kv_of([FULL], 100), tokens_of(0, 100)
        begun(kv, 1, tokens, 32)
        assert kv.checkpoint(1, 32, PointKind.HEAD) == ()

    def test_one_confirmed_late_is_found_where_it_was_made(self):
        """Others have parted from the sequence since, and it has gone on: its place lies some segments above."""
        kv, tokens = kv_of([FULL, STATE], 1000), tokens_of(0, 200)
        begun(kv, 1, tokens, 32)
        kv.checkpoint(1, 32, PointKind.HEAD)
        advance(kv, 1, tokens, 32, 64)
        begun(kv, 2, [*tokens[:64], *tokens_of(900, 64)], 128)
        advance(kv, 1, tokens, 64, 128)
        kv.check()
        kv.confirm_checkpoint(1, 32)
        kv.check()
        assert kv.get_computed_blocks(chain([*tokens[:32], 7]), 33).num_tokens == 32
        assert kv.get_computed_blocks(chain(tokens), 200).num_tokens == 32

    def test_the_newest_becomes_a_resume_point_where_the_sequence_ends(self):
        kv, tokens = kv_of([FULL, STATE], 1000), tokens_of(0, 100)
        begun(kv, 1, tokens, 32)
        kv.checkpoint(1, 32, PointKind.TURN_END)
        kv.confirm_checkpoint(1, 32)
        advance(kv, 1, tokens, 32, 40)
        assert kv.get_computed_blocks(chain(tokens), 100).num_tokens == 0
        kv.free(1, 40)
        assert kv.get_computed_blocks(chain(tokens), 100).num_tokens == 32
        kv.check()

    def test_one_that_is_confirmed_after_its_sequence_has_ended_is_nobodys(self):
        kv, tokens = kv_of([FULL, STATE], 1000), tokens_of(0, 100)
        begun(kv, 1, tokens, 32)
        kv.checkpoint(1, 32, PointKind.HEAD)
        kv.free(1, 33, is_settled=False)
        kv.confirm_checkpoint(1, 32)
        kv.check()
        assert kv.used_bytes == 0

    def test_without_memory_the_newest_is_written_anew(self):
        """Another sequence holds the rest: only its own older one can make room."""
        kv, tokens = kv_of([FULL, STATE], 120), tokens_of(0, 400)
        begun(kv, 1, tokens, 32)
        (first,) = kv.checkpoint(1, 32, PointKind.TURN_END)
        kv.confirm_checkpoint(1, 32)
        advance(kv, 1, tokens, 32, 48)
        kv.start(2, kv.get_computed_blocks(b"", 1000), b"")
        num_tokens = SIZE
        while kv.allocate(2, num_tokens) is not None:
            num_tokens += SIZE
        (second,) = kv.checkpoint(1, 48, PointKind.TURN_END)
        assert second.target == first.target
        assert kv.checkpoint(1, 64, PointKind.HEAD) == (), "and there is no second one"
        kv.confirm_checkpoint(1, 48)
        kv.check()


class TestRegistering:
    def test_window_blocks_that_were_left_behind_come_back_when_they_are_computed_again(self):
        """The content is known, but a group has forgotten its blocks: it takes those of whoever brings them."""
        kv, tokens = kv_of([FULL, SlidingWindowSpec(1, 8, window=2 * SIZE)], 60), tokens_of(0, 200)
        Session(kv).run(tokens)
        pools = kv._coordinator.pools
        assert kv._coordinator.make_room([pools[0].num_empty + 9])
        shorter = tokens[:96]
        before = kv.get_computed_blocks(chain([*shorter, 7]), 97)
        assert before.num_tokens == 0
        kv.take_events()
        begun(kv, 9, shorter, 96)
        stored = kv.take_events()
        assert [(e.group, e.first_index, e.parent_hash) for e in stored] == [
            (1, index, chain(tokens)[16 * index - 16 : 16 * index] or None) for index in range(6)
        ]
        assert b"".join(e.hashes for e in stored) == chain(shorter)
        assert not kv.is_current(before, chain([*shorter, 7])), "what was missing is back"
        assert kv.get_computed_blocks(chain([*shorter, 7]), 97).num_tokens == 96
        kv.check()
        kv.free(9, 96)
        kv.take_events()
        # And can be left behind again.
        assert kv._coordinator.make_room([pools[0].num_empty + 4])
        assert [(e.group, e.hashes) for e in kv.take_events()] == [(1, chain(tokens)[: 4 * 16])]
        assert kv.get_computed_blocks(chain([*shorter, 7]), 97).num_tokens == 96
        kv.check()


class TestLookup:
    def test_content_that_nobody_has_is_no_groups_fault(self):
        kv = kv_of([FULL, STATE], 1000)
        begun(kv, 1, tokens_of(0, 100), 32)
        assert [group.num_limited for group in kv.stats().groups] == [0, 0]
        begun(kv, 2, tokens_of(0, 100), 48)
        assert [group.num_limited for group in kv.stats().groups] == [0, 1], "the blocks were there, a state was not"

    def test_what_one_group_s_limit_takes_from_another_limits_the_hit(self):
        """A state was confirmed late, when the window before it had gone: each alone could go on, but nowhere both."""
        kv, tokens = kv_of([SlidingWindowSpec(1, 8, window=2 * SIZE), STATE], 60), tokens_of(0, 160)
        begun(kv, 1, tokens, 32)
        kv.checkpoint(1, 32, PointKind.HEAD)
        for position in range(32, 144, SIZE):
            advance(kv, 1, tokens, position, position + SIZE)
        assert kv._coordinator.make_room([kv._coordinator.pools[0].num_empty + 4, 0])
        kv.confirm_checkpoint(1, 32)
        found = kv.get_computed_blocks(chain(tokens), 160)
        assert (found.num_tokens, found.group_hits, found.limited_by) == (0, (144, 32), 0)
        kv.check()

    @pytest.mark.parametrize("is_window_first", [True, False])
    def test_a_limit_that_another_has_lowered_is_looked_at_again(self, is_window_first):
        """In whatever order: of two states the window lacks what the further one needs, but goes on between the two."""
        kinds = [(SlidingWindowSpec(1, 8, window=2 * SIZE), 512, 20), (STATE, 8192, 5)]
        if not is_window_first:
            kinds.reverse()
        groups = tuple(KVGroup(i, i, spec, (i,), page) for i, (spec, page, _) in enumerate(kinds))
        pools = tuple(KVPool(i, page, (i,), num_blocks) for i, (_, page, num_blocks) in enumerate(kinds))
        kv = KVCacheManager(KVLayout(SIZE, groups, pools, 20 * 512 + 5 * 8192, 400))
        tokens = tokens_of(0, 160)
        begun(kv, 1, tokens, 32)
        kv.checkpoint(1, 32, PointKind.HEAD)
        kv.confirm_checkpoint(1, 32)
        begun(kv, 2, tokens[:70], 32)
        for position in range(32, 144, SIZE):
            if position == 80:
                kv.checkpoint(1, 80, PointKind.HEAD)
            advance(kv, 1, tokens, position, position + SIZE)
        advance(kv, 2, tokens, 32, 64)
        window = 0 if is_window_first else 1
        needs = [0, 0]
        needs[window] = kv._coordinator.pools[window].num_empty + 2
        assert kv._coordinator.make_room(needs)
        kv.confirm_checkpoint(1, 80)
        found = kv.get_computed_blocks(chain(tokens), 160)
        assert (found.num_tokens, found.group_hits[1 - window]) == (32, 80)
        kv.check()

    def test_a_whole_prompt_whose_window_is_gone_hits_what_is_left(self):
        """It can't hit all but its last token: the last block's window has been given up."""
        kv, tokens = kv_of([WINDOW], 400), tokens_of(0, 1600)
        session = Session(kv)
        session.run([*tokens, *tokens_of(5000, 1600)])
        assert session.lookup(tokens).num_tokens == 1599
        kv.take_events()
        pools = kv._coordinator.pools
        assert kv._coordinator.make_room([pools[0].num_empty + 50])
        gone = {h for e in kv.take_events() if isinstance(e, BlocksRemoved) for h in split_hashes(e.hashes)}
        assert gone & set(split_hashes(chain(tokens)))
        assert session.lookup(tokens).num_tokens == 0

    def test_sources_of_copies_are_accounted_for_until_the_plan_is_complete(self):
        kv, tokens = kv_of([FULL], 100), tokens_of(0, 64)
        Session(kv).run(tokens, [1])
        kv.start(9, kv.get_computed_blocks(chain(tokens), 64), chain(tokens))
        kv.check()
        assert kv.num_used_blocks == 5
        kv.release_sources()
        kv.check()
        assert kv.num_used_blocks == 4


class TestLookahead:
    def test_speculative_slots_are_there_before_their_tokens(self):
        """Room for rows that may be rejected; they are written again without a new block. Never beyond the context."""
        kv = kv_of([FULL, WINDOW], 400)
        kv.start(1, kv.get_computed_blocks(b"", 30), b"")
        assert {group: len(ids) for group, ids in kv.allocate(1, 30, num_lookahead=4).items()} == {0: 3, 1: 3}
        assert kv.allocate(1, 34, 30) == {}
        assert {group: len(ids) for group, ids in kv.allocate(1, 48, 40, num_lookahead=9).items()} == {0: 1, 1: 1}
        assert kv.allocate(1, 63, 60, num_lookahead=9) == {}, "a context of 64 tokens has no fifth block"
        kv.check()
        kv.free(1, 63)
        assert kv.used_bytes == 0
