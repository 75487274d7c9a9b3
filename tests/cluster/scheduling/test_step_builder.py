"""A plan whose blocks move between pools while it is made."""

from cluster.kv.layout import KVGroup, KVLayout, KVPool
from cluster.kv.manager import KVCacheManager
from cluster.kv.points import PointKind
from cluster.kv.sequence import TableEdit
from cluster.scheduling.live import LiveRequest
from cluster.scheduling.plan import Slice
from cluster.scheduling.step_builder import StepBuilder
from tests.cluster.kv.hybrid_machine import FULL, STATE
from tests.cluster.scheduling.rig import request_of


def ledger():
    """20 blocks of 10 bytes and 2 states of 40, null blocks included."""
    groups = (KVGroup(0, 0, FULL, (0,), 10), KVGroup(1, 1, STATE, (1,), 40))
    return KVCacheManager(KVLayout(4, groups, (KVPool(0, 10, (0,), 20), KVPool(1, 40, (1,), 2)), 280, 200))


def begin(kv, step, seq_id, num_tokens):
    tokens = tuple(range(100 * seq_id, 100 * seq_id + num_tokens))
    live = LiveRequest(request_of(str(seq_id), tokens), 0.0, 100, list(tokens), bytearray(), num_tokens, seq_id=seq_id)
    step.start(live, kv.get_computed_blocks(b"", num_tokens), {}, 0.0)
    step.slices.append(Slice(seq_id, 0, num_tokens, True, step.allocate(live, num_tokens)))
    return live


def test_all_that_it_holds_already_is_renamed():
    """The third sequence of a plan needs a state: the boundary moves over blocks that the first was given."""
    kv = ledger()
    before_step = StepBuilder(kv, 1, [], [])
    begin(kv, before_step, 1, 40)
    step = StepBuilder(kv, 2, [], [])
    begin(kv, step, 2, 20)
    before = kv.block_tables(2)
    step.edits.append(TableEdit(2, 0, 2, before[0][2]))
    kv.free(1)
    begin(kv, step, 3, 4)
    begin(kv, step, 4, 4)
    plan = step.finish([])
    assert any(resize.moves for resize in plan.resizes), "blocks were meant to move"
    tables = kv.block_tables(2)
    assert tables[0] != before[0]
    assert plan.slices[0].new_blocks[0] == tables[0]
    assert plan.edits == (TableEdit(2, 0, 2, tables[0][2]),)
    assert plan.new_sequences[0].block_tables[1] == tables[1]
    assert plan.zeroes == {1: (*tables[1], *kv.block_tables(3)[1], *kv.block_tables(4)[1])}


def test_copies_that_it_holds_already_are_renamed():
    """A state is kept and then blocks are short: the copy moves to what an earlier sequence left."""
    groups = (KVGroup(0, 0, FULL, (0,), 10), KVGroup(1, 1, STATE, (1,), 40))
    kv = KVCacheManager(KVLayout(4, groups, (KVPool(0, 10, (0,), 6), KVPool(1, 40, (1,), 6)), 300, 200))
    begin(kv, StepBuilder(kv, 1, [], []), 1, 4)
    gone = begin(kv, StepBuilder(kv, 1, [], []), 5, 4)
    step = StepBuilder(kv, 2, [], [])
    live = begin(kv, step, 2, 4)
    step.checkpoint(live, 4, PointKind.HEAD)
    kv.free(1)
    kv.free(gone.seq_id)
    begin(kv, step, 3, 40)
    plan = step.finish([])
    (resize,) = [resize for resize in plan.resizes if resize.moves]
    assert dict(resize.moves) == {4: 1}
    assert [(copy.source, copy.target) for copy in plan.copies] == [(3, 1)]
    assert kv.block_tables(2)[1] == (3,)
    kv.check()


def test_a_state_that_there_is_no_memory_for_leaves_no_trace():
    """The next place on the way is tried as if this one had not been."""
    kv = ledger()
    step = StepBuilder(kv, 1, [], [])
    live = begin(kv, step, 1, 4)
    step.checkpoint(live, 4, PointKind.INTERVAL)
    assert (live.kept_at, step.checkpoints, step.finish([]).copies) == (0, [], ())
