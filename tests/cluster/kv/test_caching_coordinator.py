"""Registering, states and look-ups, where their order is unusual."""

from cluster.kv.events import BlocksRemoved
from cluster.kv.hashing import split_hashes
from cluster.kv.points import PointKind
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


class TestLookup:
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
