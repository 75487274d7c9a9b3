"""What goes first when memory is short, where the order of things is unusual."""

import pytest

from cluster.kv import retention
from cluster.kv.layout import KVGroup, KVLayout, KVPool
from cluster.kv.manager import KVCacheManager
from cluster.kv.points import PointKind
from cluster.kv.spec import ChunkedLocalSpec
from tests.cluster.kv.test_manager import FULL, SIZE, STATE, WINDOW, Session, chain, kv_of, tokens_of


def evict(kv, num_blocks=1):
    """Make so many more blocks of the first pool empty."""
    coordinator = kv._coordinator
    needs = [0] * len(coordinator.pools.pools)
    needs[0] = coordinator.pools[0].num_empty + num_blocks
    assert coordinator.make_room(needs)
    kv.take_resizes()
    kv.check()


class TestRunningSequences:
    def test_a_leaf_that_has_grown_since_it_was_queued_stays(self):
        """It is inner now: the next in line goes instead."""
        kv = kv_of([FULL], 400, policy="lru")
        session = Session(kv)
        prompts = [tokens_of(1000 * i, 17) for i in range(130)]
        for prompt in prompts:
            session.run(prompt)
        evict(kv, kv._coordinator.pools[0].num_evictable - 129)
        assert session.lookup(prompts[0]).num_tokens == 0, "the oldest went, and all were ranked"
        longer = [*prompts[1][:16], *tokens_of(900_000, 64)]
        kv.start(999, kv.get_computed_blocks(chain(longer), 80), chain(longer))
        kv.allocate(999, 80)
        kv.register(999, 1, chain(longer)[16:])
        evict(kv)
        assert session.lookup(prompts[1]).num_tokens == 16
        assert session.lookup(prompts[2]).num_tokens == 0
        assert [s.is_point for s in kv._coordinator.tree.walk() if s.children] == [True]

    def test_the_state_that_somebody_is_starting_from_stays(self):
        """Making room for its copy asks for the one point that ranks lowest: the very one to be copied."""
        kv, session, prompt, longer = self.inner_and_leaf()
        computed = session.lookup([*prompt[:32], 7, 8])
        assert kv.can_allocate(computed, 34)
        started = kv.start(99, computed, chain([*prompt[:32], 7, 8]))
        assert len(started.copies) == 1
        kv.check()
        kv.release_sources()
        assert session.lookup(prompt).num_tokens == 32
        assert session.lookup([*longer[:64], 1]).num_tokens == 32, "the other one went"

    def test_it_stays_even_if_it_is_all_that_could_go(self):
        """Until the plan that copies it is complete."""
        kv, session, prompt, longer = self.inner_and_leaf()
        parting = [*prompt[:32], 7, 8]
        (leaf,) = [s for s in kv._coordinator.tree.walk() if not s.children]
        leaf.priority = 20
        kv._coordinator.retention.designate(leaf, leaf.kind)
        kv.start(99, session.lookup(parting), chain(parting))
        assert session.lookup([*longer[:64], 1]).num_tokens == 32, "the leaf has gone for the state of its own"
        assert not kv._coordinator.make_room([0, 1])
        assert session.lookup(prompt).num_tokens == 32
        kv.check()
        kv.release_sources()
        kv.free(99, 33)
        assert kv._coordinator.make_room([0, 2])
        assert session.lookup(prompt).num_tokens == 0
        kv.check()

    def inner_and_leaf(self):
        """A prompt with a state at 32 tokens, another that goes on from there to 64, and no state left to take."""
        groups = (KVGroup(0, 0, FULL, (0,), 512), KVGroup(1, 1, STATE, (1,), 8192))
        pools = (KVPool(0, 512, (0,), 12), KVPool(1, 8192, (1,), 9))
        kv = KVCacheManager(KVLayout(SIZE, groups, pools, 512 * 12 + 8192 * 9, 400))
        session = Session(kv)
        prompt = tokens_of(0, 33)
        session.run(prompt)
        longer = [*prompt[:32], *tokens_of(500, 33)]
        session.run(longer)
        filler = 1000
        while kv._coordinator.pools[1].num_empty:
            kv.start(filler, kv.get_computed_blocks(b"", 1))
            filler += 1
        assert session.lookup(prompt).num_tokens == 32
        assert session.lookup([*longer[:64], 1]).num_tokens == 64
        return kv, session, prompt, longer

    def test_the_state_of_a_point_that_is_only_passed_goes_before_that_of_the_end(self):
        kv, session, prompt, longer = self.inner_and_leaf()
        assert kv._coordinator.make_room([0, 1])
        assert session.lookup(prompt).num_tokens == 0
        assert session.lookup([*longer[:64], 1]).num_tokens == 64
        kv.check()

    def test_what_a_running_sequence_holds_of_a_leaf_stays(self):
        kv = kv_of([FULL, WINDOW], 300)
        session = Session(kv)
        prompt = tokens_of(0, 1600)
        session.run(prompt)
        half = [*prompt[:800], 5]
        kv.start(99, kv.get_computed_blocks(chain(half), 801), chain(half))
        evict(kv, 60)
        assert session.lookup(half).num_tokens == 800


class TestFreshRanks:
    def test_what_has_been_used_since_it_was_queued_waits_its_turn(self):
        kv = kv_of([FULL], 400, policy="lru")
        session = Session(kv)
        prompts = [tokens_of(1000 * i, 17) for i in range(130)]
        for prompt in prompts:
            session.run(prompt)
        evict(kv, kv._coordinator.pools[0].num_evictable - 129)
        session.run(prompts[1])
        evict(kv, 2)
        assert [session.lookup(prompts[i]).num_tokens for i in (1, 2, 3, 4)] == [16, 0, 0, 16]

    def test_points_on_the_way_go_before_what_is_worth_more(self):
        """The windows of a long prompt's points on the way are worth less than other prompts."""
        kv = kv_of([FULL, WINDOW], 1550)
        session = Session(kv, chunk=512)
        others = [tokens_of(100_000 * i, 161) for i in range(1, 20)]
        for prompt in others:
            session.run(prompt)
        evict(kv, 20)
        assert sum(session.lookup(prompt).num_tokens > 0 for prompt in others) == 18
        session.run(tokens_of(0, 17_000))
        assert sum(session.lookup(prompt).num_tokens > 0 for prompt in others) >= 16
        lengths = [session.lookup([*tokens_of(0, at), 1]).num_tokens for at in range(4096, 17_000, 4096)]
        assert lengths != [4096, 8192, 12_288, 16_384]


class TestCopiedBlocks:
    """A prompt sent again copies its last block; until the plan is complete the source is held, without a cursor."""

    @pytest.mark.parametrize("specs", [[FULL], [FULL, WINDOW]])
    def test_the_source_of_a_copy_stays_whatever_its_rank_was(self, specs):
        kv = kv_of(specs, 400, policy="lru")
        session = Session(kv)
        prompts = [tokens_of(1000 * i, 17)[:16] for i in range(130)]
        for prompt in prompts:
            session.run(prompt, [1])
        evict(kv, kv._coordinator.pools[0].num_evictable - 129 * len(specs))
        kv.start(999, session.lookup(prompts[1]), chain(prompts[1]))
        kv.take_events()
        evict(kv)
        assert [e.hashes for e in kv.take_events()] == [chain(prompts[2])] * len(specs)
        assert session.lookup(prompts[1]).num_tokens == 15
        assert session.lookup(prompts[2]).num_tokens == 0
        kv.release_sources()
        kv.check()

    def test_whoever_ends_there_meanwhile_leaves_it_to_the_next_ranking(self):
        kv = kv_of([FULL], 20)
        prompt = tokens_of(0, 48)
        kv.start(1, kv.get_computed_blocks(chain(prompt), 48), chain(prompt))
        kv.allocate(1, 48)
        kv.register(1, 0, chain(prompt))
        kv.start(2, kv.get_computed_blocks(chain(prompt), 48), chain(prompt))
        kv.free(1, 48)
        kv.check()
        kv.release_sources()
        kv.free(2, 48)
        evict(kv, kv._coordinator.pools[0].num_evictable)
        assert kv.num_cached_blocks == 0

    def test_what_is_still_to_be_copied_can_not_be_had(self):
        """Even if the sequence that wanted the copy has ended, until its plan is complete."""
        groups = (KVGroup(0, 0, FULL, (0,), 512), KVGroup(1, 1, STATE, (1,), 8192))
        pools = (KVPool(0, 512, (0,), 3), KVPool(1, 8192, (1,), 3))
        kv = KVCacheManager(KVLayout(SIZE, groups, pools, 512 * 3 + 8192 * 3, 400))
        prompt, other = tokens_of(0, 33), tokens_of(1000, 32)
        kv.start(1, kv.get_computed_blocks(b"", 33), chain(prompt))
        kv.allocate(1, 32)
        kv.register(1, 0, chain(prompt))
        kv.free(1, 32)
        kv.start(2, kv.get_computed_blocks(chain(prompt), 33), chain(prompt))
        kv.free(2, 32)
        kv.start(3, kv.get_computed_blocks(chain(other), 32), chain(other))
        assert kv.allocate(3, 32) is None
        kv.check()
        kv.release_sources()
        assert kv.allocate(3, 32) is not None
        kv.check()

    def test_one_at_a_place_that_is_no_point_leaves_nothing_behind(self):
        """At a chunk's start a sequence keeps nothing; another is just copying the last block there when it ends."""
        kv, tokens = kv_of([ChunkedLocalSpec(1, 8, 2 * SIZE)], 12), tokens_of(0, 2 * SIZE)
        kv.start(1, kv.get_computed_blocks(b"", 32), chain(tokens))
        kv.allocate(1, 32)
        kv.register(1, 0, chain(tokens))
        found = kv.get_computed_blocks(chain(tokens), 32)
        assert found.copies_last
        (copy,) = kv.start(2, found, chain(tokens)).copies
        kv.free(1, 32)
        kv.check()
        assert (0, chain(tokens)[16:]) not in kv.snapshot()
        assert copy.source not in kv.start(3, kv.get_computed_blocks(b"", 1)).tables[0]
        kv.release_sources()
        kv.free(2, 32)
        kv.free(3)
        evict(kv, kv.num_cached_blocks)
        assert kv.num_cached_blocks == 0


class TestChains:
    def test_a_point_that_went_as_a_leaf_is_passed_over_at_its_rank_of_before(self):
        """The shorter prompt's point was inner when it was ranked; once the longer one goes it is a leaf too."""
        kv = kv_of([FULL, WINDOW], 40, policy="lru")
        session = Session(kv)
        session.run(tokens_of(0, 33))
        session.run(tokens_of(0, 65))
        session.run(tokens_of(1000, 65))
        evict(kv, 9)
        assert session.lookup(tokens_of(0, 65)).num_tokens == 0
        assert session.lookup(tokens_of(1000, 65)).num_tokens == 0
        kv.check()

    def test_a_point_on_the_way_that_keeps_nothing_alone_is_not_in_the_way(self):
        """At a chunk's start only full attention needs anything, and what goes on from there needs that too."""
        kv = kv_of([FULL, ChunkedLocalSpec(1, 8, 2 * SIZE)], 40)
        session = Session(kv)
        session.run(tokens_of(0, 33))
        session.run(tokens_of(0, 49))
        evict(kv, 4)
        assert session.lookup(tokens_of(0, 49)).num_tokens == 32

    def test_a_prompt_that_parts_before_a_point_does_not_stop_there(self):
        """However long it is, and although something known goes on from the point."""
        kv = kv_of([FULL], 60)
        session = Session(kv)
        session.run(tokens_of(0, 65))
        session.run(tokens_of(0, 97))
        session.run([*tokens_of(0, 33), *tokens_of(5000, 200)])
        assert [(s.end, s.num_stops) for s in kv._coordinator.tree.walk() if s.children] == [(2, 0), (4, 0)]
        session.run([*tokens_of(0, 65), *tokens_of(6000, 200)])
        assert [(s.end, s.num_stops) for s in kv._coordinator.tree.walk() if s.children] == [(2, 0), (4, 1)]

    def test_nested_prompts_go_altogether_when_all_memory_is_wanted(self):
        """A point that was inner when it was ranked, and has become a leaf and gone, is passed over."""
        kv = kv_of([FULL, WINDOW], 600)
        session = Session(kv)
        for num_tokens in (33, 65, 129, 1601):
            session.run(tokens_of(0, num_tokens))
        evict(kv, kv._coordinator.pools[0].num_evictable)
        assert kv.snapshot() == []
        assert kv._coordinator.tree.num_segments == 0

    def test_a_point_that_needs_nothing_is_none(self):
        """At a chunk's start nothing before it is seen; kept points without blocks would pile up for ever."""
        kv = kv_of([ChunkedLocalSpec(1, 8, 2 * SIZE)], 12)
        session = Session(kv)
        for i in range(30):
            session.run(tokens_of(1000 * i, 2 * SIZE + 1))
        assert kv._coordinator.tree.num_segments <= 12
        assert kv.num_cached_blocks <= 12


class TestPointsOnTheWay:
    def test_a_long_prompt_can_be_resumed_in_its_midst(self):
        kv = kv_of([FULL, WINDOW], 1000)
        session, prompt = Session(kv), tokens_of(0, 9000)
        session.run(prompt)
        # As if its end were gone.
        (end,) = [s for s in kv._coordinator.tree.walk() if not s.children]
        kv._coordinator.retention._drop_leaf(end, 1)
        kv.check()
        assert session.lookup(prompt).num_tokens == 8192

    @pytest.mark.parametrize(
        ("specs", "policy", "num_made"),
        [([FULL, WINDOW], "value", 2), ([FULL], "value", 0), ([FULL, STATE], "value", 0), ([FULL, WINDOW], "lru", 0)],
    )
    def test_windows_make_them_if_the_policy_can_tell_what_they_are_worth(self, specs, policy, num_made):
        kv = kv_of(specs, 2000, policy=policy)
        Session(kv).run(tokens_of(0, 9000))
        kinds = [s.kind for s in kv._coordinator.tree.walk() if s.is_point]
        assert kinds.count(PointKind.INTERVAL) == num_made


class TestCheckpoints:
    def ledger(self, **options):
        """Three states; an old one is cached, a running sequence holds its own and has none kept yet."""
        groups = (KVGroup(0, 0, FULL, (0,), 512), KVGroup(1, 1, STATE, (1,), 8192))
        pools = (KVPool(0, 512, (0,), 16), KVPool(1, 8192, (1,), 3))
        kv = KVCacheManager(KVLayout(SIZE, groups, pools, 512 * 16 + 8192 * 3, 400))
        old, tokens = tokens_of(0, 32), tokens_of(5000, 100)
        kv.start(1, kv.get_computed_blocks(b"", 32), chain(old), **options)
        kv.allocate(1, 32)
        kv.register(1, 0, chain(old))
        kv.free(1, 32)
        kv.start(99, kv.get_computed_blocks(chain(tokens), 100), chain(tokens))
        kv.allocate(99, 64)
        kv.register(99, 0, chain(tokens)[:64])
        return kv

    def test_one_on_the_way_takes_only_memory_that_lies_idle(self):
        kv = self.ledger()
        assert kv.checkpoint(99, 64, PointKind.INTERVAL) == ()
        assert kv.get_computed_blocks(chain(tokens_of(0, 33)), 33).num_tokens == 32

    def test_one_that_is_worth_more_takes_the_place_of_another(self):
        kv = self.ledger()
        assert len(kv.checkpoint(99, 64, PointKind.HEAD)) == 1
        assert kv.get_computed_blocks(chain(tokens_of(0, 33)), 33).num_tokens == 0
        kv.check()

    @pytest.mark.parametrize("options", [{"priority": 9}, {"pinned_until_s": 5.0}])
    def test_one_that_is_worth_less_is_not_made(self, options):
        kv = self.ledger(**options)
        assert kv.checkpoint(99, 64, PointKind.HEAD) == ()
        assert kv.get_computed_blocks(chain(tokens_of(0, 33)), 33).num_tokens == 32
        kv.check()


class TestGaps:
    def test_what_a_returning_prefix_registers_waits_as_it_did(self):
        kv = kv_of([FULL], 100)
        session = Session(kv)
        session.run(tokens_of(0, 161))
        for i in range(1, 4):
            session.run(tokens_of(1000 * i, 161))
        longer = [*tokens_of(0, 160), *tokens_of(9000, 80)]
        session.run(longer)
        ends = [(s.end, s.gap) for s in kv._coordinator.tree.walk() if bytes(s.hashes[:16]) in chain(longer)]
        assert ends == [(10, 4), (15, 4)]
        fresh = [*tokens_of(0, 160), *tokens_of(7000, 80)]
        kv.start(99, session.lookup(fresh), chain(fresh))
        assert kv._coordinator.sequences[99].gap == -1, "somebody else, of whom nothing is known"

    def test_of_one_that_is_found_cut_the_end_tells(self):
        kv = kv_of([FULL], 100)
        session, stops = Session(kv), kv._coordinator.retention._stops
        session.run(tokens_of(0, 161))
        evict(kv, 3)
        before = stops._num_cuts
        kv.start(99, session.lookup(tokens_of(0, 161)), chain(tokens_of(0, 161)))
        assert kv._coordinator.sequences[99].gap == 1
        assert stops._num_cuts == before + 1


class TestGhosts:
    def test_only_so_many_are_remembered(self, monkeypatch):
        monkeypatch.setattr(retention, "_MAX_GHOSTS", 3)
        kv = kv_of([FULL], 40)
        session = Session(kv)
        for i in range(12):
            session.run(tokens_of(1000 * i, 161))
        assert len(kv._coordinator.retention._ghosts) == 3

    @pytest.mark.parametrize("is_forgotten", [False, True])
    def test_one_that_is_wanted_again_teaches_the_gap(self, is_forgotten):
        kv = kv_of([FULL], 25, policy="lru")
        session = Session(kv)
        first = tokens_of(0, 161)
        session.run(first)
        for i in range(1, 4):
            session.run(tokens_of(1000 * i, 161))
        assert session.lookup(first).num_tokens == 0
        if is_forgotten:
            kv.reset()
        kv.start(99, session.lookup(first), chain(first))
        assert kv._coordinator.sequences[99].gap == (-1 if is_forgotten else 4)
