"""Plans against the engine: what it reports, refuses and never does to its pools."""

import random
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models import qwen3

from cluster.kv.hashing import hash_blocks
from protos.cidery.v1 import sampling_pb2
from protos.cidery.v1.sampling_pb2 import SamplingParams
from protos.cidery.worker.v1 import worker_pb2 as pb
from tests.worker.driver import ROOT, Driver, Request, configure_of, make_engine
from tests.worker.families import VOCAB_SIZE, config_of, make_model
from worker import models
from worker.engine import Engine
from worker.errors import ProtocolError
from worker.metal.dispatch import twin_kernels
from worker.speculation import Speculation

_GREEDY = SamplingParams(temperature=0.0)


pytestmark = pytest.mark.usefixtures("no_compile")


@pytest.fixture(scope="module")
def model():
    return make_model("qwen3")


@pytest.fixture
def engine(model):
    return make_engine(model, config_of("qwen3"))


def _pools(engine: Engine) -> list[mx.array]:
    """Keys and values of each layer; the engine holds them alone again when the list is gone."""
    return [array for _, array in sorted(engine._tensors._writer._arrays.items())]


def _num_committed(engine: Engine) -> int:
    return len(_pools(engine)[0]) // 2


def _sequence(seq_id=1, token_ids=(1, 2, 3), **fields) -> pb.NewSequence:
    return pb.NewSequence(seq_id=seq_id, token_ids=token_ids, **{"sampling": _GREEDY, **fields})


def _slice(seq_id=1, start=0, num_tokens=3, samples=True, blocks=(5,), group=0, max_drafts=0) -> pb.Slice:
    new_blocks = [pb.GroupBlocks(group=group, block_ids=blocks)] if blocks else []
    return pb.Slice(
        seq_id=seq_id,
        start=start,
        num_tokens=num_tokens,
        samples=samples,
        new_blocks=new_blocks,
        max_drafts=max_drafts,
    )


def _plan(*slices, sequences=(), **fields) -> pb.StepPlan:
    return pb.StepPlan(step_id=1, new_sequences=sequences, slices=slices, **fields)


VIOLATIONS = {
    "released sequence 9 is unknown": _plan(released_seq_ids=[9]),
    "slice of sequence 9, which is unknown": _plan(_slice(seq_id=9)),
    "sequence 1 has no tokens": _plan(sequences=[_sequence(token_ids=())]),
    "token id 320 is not below the vocabulary's 320": _plan(sequences=[_sequence(token_ids=[1, 320])]),
    "new sequence 1 is already known": _plan(sequences=[_sequence(), _sequence()]),
    r"slice \[0, 4\) reaches beyond the 3 known tokens": _plan(_slice(num_tokens=4), sequences=[_sequence()]),
    r"slice \[0, 0\) is empty": _plan(_slice(num_tokens=0), sequences=[_sequence()]),
    r"slice \[0, 2\) samples but does not end": _plan(_slice(num_tokens=2), sequences=[_sequence()]),
    r"slice \[0, 3\) allows drafts where there can be none": _plan(_slice(max_drafts=2), sequences=[_sequence()]),
    "needs 1 blocks but the block table of group 0 has 0": _plan(_slice(blocks=()), sequences=[_sequence()]),
    r"block id 256 is not in \[1, 256\)": _plan(_slice(blocks=[256]), sequences=[_sequence()]),
    r"block id 0 is not in \[1, 256\)": _plan(_slice(blocks=[0]), sequences=[_sequence()]),
    "group 1 does not exist": _plan(_slice(group=1), sequences=[_sequence()]),
    "sequence 1 has two slices": _plan(_slice(), _slice(), sequences=[_sequence()]),
    "block copy: block id 300": _plan(copies=[pb.BlockCopy(source=300, target=1)]),
    "block table edit of sequence 9, which is unknown": _plan(edits=[pb.TableEdit(seq_id=9, block_id=1)]),
    "block copy: group 3": _plan(copies=[pb.BlockCopy(group=3, source=2, target=1)]),
    "resize of pool 1, of 1": _plan(resizes=[pb.PoolResize(pool=1, num_blocks=9)]),
    "resize of pool 0 to 0 blocks; at least 1": _plan(resizes=[pb.PoolResize(num_blocks=0)]),
    "resize of pool 0 from 256 to 200 blocks moves block 100 to 3": _plan(
        resizes=[pb.PoolResize(num_blocks=200, moves=[pb.PoolResize.Move(source=100, target=3)])]
    ),
    "resize of pool 0 from 256 to 200 blocks moves block 220 to 0": _plan(
        resizes=[pb.PoolResize(num_blocks=200, moves=[pb.PoolResize.Move(source=220, target=0)])]
    ),
    r"block id 250 is not in \[1, 200\)": _plan(
        _slice(blocks=[250]), sequences=[_sequence()], resizes=[pb.PoolResize(num_blocks=200)]
    ),
    "zeroing: block id 300": _plan(zeroes=[pb.GroupBlocks(block_ids=[300])]),
    "15 bytes of block hashes; allowed is a multiple of 16, up to 0": _plan(
        sequences=[_sequence(block_hashes=b"x" * 15)]
    ),
    "temperature is -1.0; it must be at least 0": _plan(sequences=[_sequence(sampling=SamplingParams(temperature=-1))]),
    r"top_p is 0.0; it must be in \(0, 1\]": _plan(sequences=[_sequence(sampling=SamplingParams(top_p=0))]),
    "num_top_logprobs is 21; it must be at most 20": _plan(
        sequences=[_sequence(sampling=SamplingParams(num_top_logprobs=21))]
    ),
}


@pytest.mark.parametrize("message", VIOLATIONS)
def test_plan_that_breaks_the_protocol_is_refused_by_name(engine, message):
    """What, which, got and allowed are all in the message."""
    with pytest.raises(ProtocolError, match=message):
        engine.execute(VIOLATIONS[message])


def test_configure_is_first_once_and_sane(model):
    engine = Engine(models.adapt(model, config_of("qwen3")), twin_kernels(), memory_limit_bytes=1)
    groups = [pb.Group(layers=[0, 1, 2])]
    good = {"block_size": 16, "num_blocks": [8], "root_hash": ROOT, "groups": groups}
    with pytest.raises(ProtocolError, match="before Configure"):
        engine.execute(pb.StepPlan())
    for field, value, message in (
        ("block_size", 0, "block_size is 0"),
        ("num_blocks", [0], "num_blocks of pool 0 is 0"),
        ("root_hash", b"short", "root_hash has 5 bytes"),
        ("groups", [pb.Group(layers=[0, 1])], r"the groups have the caches \[0, 1\]"),
        ("groups", [pb.Group(pool=1, layers=[0, 1, 2])], "group 0 is in pool 1; there are 1"),
        ("groups", [*groups, pb.Group()], "group 1 mixes recurrent states and attention, or is empty"),
    ):
        with pytest.raises(ProtocolError, match=message):
            engine.configure(pb.Configure(**{**good, field: value}))
    engine.configure(pb.Configure(**good))
    with pytest.raises(ProtocolError, match="twice"):
        engine.configure(pb.Configure(**good))
    engine.reset()
    engine.configure(pb.Configure(**good))


def test_prompt_of_exactly_one_block_reports_that_block(engine):
    """Its last slot is computed in this step, and the next token starts a new block."""
    prompt = list(range(16))
    result = engine.execute(_plan(_slice(num_tokens=16), sequences=[_sequence(token_ids=prompt)]))
    (filled,) = result.filled_blocks
    assert (filled.seq_id, filled.block_index) == (1, 0)
    assert filled.block_hash == hash_blocks(ROOT, prompt, 16)[0]
    following = engine.execute(_plan(_slice(start=16, num_tokens=1, blocks=[6])))
    assert not following.filled_blocks


def test_cached_blocks_are_not_reported_again(engine):
    """Blocks that come with the sequence were announced by whoever filled them."""
    prompt = list(range(40))
    tables = [pb.GroupBlocks(block_ids=[1, 2])]
    engine.execute(_plan(_slice(num_tokens=40, blocks=[1, 2, 3]), sequences=[_sequence(token_ids=prompt)]))
    sequence = _sequence(seq_id=2, token_ids=prompt + list(range(8)), block_tables=tables)
    result = engine.execute(_plan(_slice(seq_id=2, start=32, num_tokens=16, blocks=[4]), sequences=[sequence]))
    assert [block.block_index for block in result.filled_blocks] == [2]


def test_blocks_of_another_size_than_kernels_were_tested_for_are_refused():
    loaded = models.adapt(make_model("qwen3"), config_of("qwen3"))
    engine = Engine(loaded, replace(twin_kernels(), block_size=16), memory_limit_bytes=1)
    with pytest.raises(ProtocolError, match="block_size is 32; the kernels were tested for 16: start the worker"):
        engine.configure(configure_of(engine, block_size=32))
    engine.configure(configure_of(engine, block_size=16))


def test_copies_read_all_sources_before_any_target_is_written(engine):
    """A swap of two blocks is a swap."""
    plan = _plan(_slice(num_tokens=32, blocks=[1, 2]), sequences=[_sequence(token_ids=list(range(32)))])
    engine.execute(plan)
    before = [np.array(pool).reshape(-1, 2, 16, 16)[1:3] for pool in _pools(engine)[::2]]
    engine.execute(_plan(copies=[pb.BlockCopy(source=1, target=2), pb.BlockCopy(source=2, target=1)]))
    after = [np.array(pool).reshape(-1, 2, 16, 16)[1:3] for pool in _pools(engine)[::2]]
    for old, new in zip(before, after, strict=True):
        assert np.array_equal(old[::-1], new)
        assert np.any(old[0] != old[1])


def test_zeroed_blocks_hold_zeros_and_their_neighbours_do_not(engine):
    plan = _plan(_slice(num_tokens=32, blocks=[1, 2]), sequences=[_sequence(token_ids=list(range(32)))])
    engine.execute(plan)
    engine.execute(_plan(zeroes=[pb.GroupBlocks(block_ids=[2])]))
    for pool in _pools(engine)[1::2]:
        blocks = np.array(pool).reshape(-1, 2, 16, 16)
        assert not blocks[2].any()
        assert blocks[1].any()


def test_null_block_stays_zero(model):
    """Padding reads it, so nothing may ever be written there."""
    engine = make_engine(model, config_of("qwen3"), num_blocks=64)
    driver = Driver(engine, num_blocks=64)
    for size in (3, 17, 40):
        driver.add(Request(list(range(size)), 6))
    driver.run()
    for pool in _pools(engine):
        assert not np.array(pool[:2]).any()


def _pointers(engine) -> list[int]:
    # The buffer protocol hands out MLX's own memory; the view is gone before the next step.
    return [np.asarray(memoryview(pool)).ctypes.data for pool in _pools(engine)]


def test_no_step_copies_a_pool(model):
    """In every kind of step each pool keeps its address, and no step needs the memory of one more pool."""
    num_blocks = 4096
    engine = make_engine(model, config_of("qwen3"), num_blocks=num_blocks)
    engine._tensors.reserve(0, num_blocks - 1)
    driver = Driver(engine, num_blocks=num_blocks, chunk=40)
    pointers = _pointers(engine)
    pool_bytes = _pools(engine)[0].nbytes
    for size in (100, 20, 1, 64, 33):
        driver.add(Request(list(range(size)), 8))
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        driver.step()
        assert mx.get_peak_memory() - before < pool_bytes
        assert _pointers(engine) == pointers
    while driver.running:
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        driver.step()
        assert mx.get_peak_memory() - before < pool_bytes
    engine.execute(_plan(copies=[pb.BlockCopy(source=1, target=2)], zeroes=[pb.GroupBlocks(block_ids=[3])]))
    assert _pointers(engine) == pointers


def test_memory_is_committed_as_block_ids_come_into_use(model):
    """A large pool costs nothing until it is used, and growing keeps what was there."""
    engine = make_engine(model, config_of("qwen3"), num_blocks=100_000)
    assert _num_committed(engine) < 1000
    engine.execute(_plan(_slice(num_tokens=16, blocks=[1]), sequences=[_sequence(token_ids=list(range(16)))]))
    before = np.array(_pools(engine)[0][2:4])
    engine.execute(_plan(_slice(start=16, num_tokens=1, blocks=[700])))
    assert 700 < _num_committed(engine) < 3000
    assert np.array_equal(np.array(_pools(engine)[0][2:4]), before)


def test_several_hundred_random_plans_agree_with_mlx_lm(model):
    """Joins, leaves, chunks, preemptions and cached prefixes at random: every request gets mlx-lm's greedy tokens.

    The driver checks each filled block's hash against the hash of the final tokens on the way.
    """
    rng = random.Random(3)
    reference_model = make_model("qwen3")
    driver = Driver(make_engine(model, config_of("qwen3"), block_size=8), block_size=8, chunk=19, seed=3)
    prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(rng.choice((1, 7, 8, 9, 30, 75)))] for _ in range(10)]
    expected = [
        [int(token) for token, _ in generate_step(mx.array(prompt), reference_model, max_tokens=12)]
        for prompt in prompts
    ]
    answered = []
    while driver.num_results < 300 or driver.running:
        if driver.num_results < 300 and len(driver.running) < 7 and rng.random() < 0.4:
            index = rng.randrange(len(prompts))
            request = Request(prompts[index], rng.randint(1, 12))
            answered.append((index, request))
            driver.add(request)
        if driver.running and rng.random() < 0.05:
            victim = rng.choice(driver.running)
            if victim.seq_id is not None:
                driver.preempt(victim)
        some = [request for request in driver.running if rng.random() < 0.8]
        driver.step(some)
    assert len(answered) > 50
    for index, request in answered:
        assert request.generated == expected[index][: request.max_tokens]


def test_seeded_request_continues_the_same_after_preemption_and_in_any_company(model):
    """Its draws depend on seed and position alone: neighbours, chunks and a recomputation never show."""
    sampling = SamplingParams(temperature=0.9, top_k=40, top_p=0.95, seed=11)
    prompt = list(range(30))
    alone = Request(prompt, 12, sampling)
    driver = Driver(make_engine(model, config_of("qwen3")))
    driver.add(alone)
    driver.run()
    company = Request(prompt, 12, sampling)
    driver = Driver(make_engine(model, config_of("qwen3")), chunk=7)
    for index, temperature in enumerate((0.0, 1.0, 2.0)):
        driver.add(Request([index] * 21, 14, SamplingParams(temperature=temperature, seed=index)))
    driver.add(company)
    while len(company.generated) < 5:
        driver.step()
    driver.preempt(company)
    driver.run()
    assert company.generated == alone.generated
    assert len(set(alone.generated)) > 6


def test_absent_sampling_parameters_are_the_models_defaults(model):
    """The request is silent: generation_config decides; here it says greedy."""
    loaded = models.adapt(model, config_of("qwen3"), models.SamplingDefaults(temperature=0.0))
    engine = Engine(loaded, twin_kernels(), memory_limit_bytes=1)
    engine.configure(configure_of(engine, num_blocks=8))
    sequences = [_sequence(sampling=SamplingParams()), _sequence(seq_id=2)]
    result = engine.execute(_plan(_slice(), _slice(seq_id=2, blocks=[6]), sequences=sequences))
    assert result.sampled[0].token_id == result.sampled[1].token_id


def test_a_block_table_edit_beyond_the_table_is_refused(engine):
    engine.execute(_plan(_slice(), sequences=[_sequence()]))
    with pytest.raises(ProtocolError, match="edit of block 3 but the block table of group 0 has 1"):
        engine.execute(_plan(edits=[pb.TableEdit(seq_id=1, index=3, block_id=1)]))


def test_after_an_edit_the_sequence_reads_the_other_block(engine):
    """A copy of its block in another place, and its own one overwritten: the same logits as before."""
    prompt = tuple(range(1, 17))
    sampling = {"sampling": sampling_pb2.SamplingParams(temperature=0.0, num_top_logprobs=0)}
    engine.execute(_plan(_slice(num_tokens=16, blocks=(5,)), sequences=[_sequence(token_ids=prompt, **sampling)]))
    copies = [pb.BlockCopy(source=5, target=7)]
    zeroes = [pb.GroupBlocks(block_ids=[5])]
    edits = [pb.TableEdit(seq_id=1, index=0, block_id=7)]
    after = engine.execute(
        _plan(_slice(start=16, num_tokens=1, blocks=(6,)), edits=edits, copies=copies, zeroes=zeroes)
    )
    whole = (*prompt, engine._sequences[1].token_ids[16])
    fresh = _sequence(seq_id=2, token_ids=whole, **sampling)
    alone = engine.execute(_plan(_slice(seq_id=2, num_tokens=17, blocks=(8, 9)), sequences=[fresh]))
    assert after.sampled[0].token_id == alone.sampled[0].token_id
    assert after.sampled[0].logprobs.logprob == pytest.approx(alone.sampled[0].logprobs.logprob, abs=1e-4)


def test_a_block_that_was_copied_and_finished_again_is_reported(engine):
    """The hit ended inside it; the next block's report would else leave a gap."""
    prompt = tuple(range(1, 17))
    cached = _sequence(token_ids=prompt, block_tables=[pb.GroupBlocks(block_ids=[5])])
    result = engine.execute(_plan(_slice(start=15, num_tokens=1, blocks=()), sequences=[cached]))
    assert [block.block_index for block in result.filled_blocks] == [0]


def test_after_a_resize_the_sequence_reads_its_block_where_it_went(engine):
    """The block beyond the new end moves, the table follows, and the next token is the one of an undisturbed run."""
    prompt = tuple(range(1, 17))
    engine.execute(_plan(_slice(num_tokens=16, blocks=(240,)), sequences=[_sequence(token_ids=prompt)]))
    moves = [pb.PoolResize.Move(source=240, target=3)]
    plan = _plan(_slice(start=16, num_tokens=1, blocks=(6,)), resizes=[pb.PoolResize(num_blocks=100, moves=moves)])
    after = engine.execute(plan)
    assert engine._sequences[1].block_tables == [[3, 6]]
    assert _num_committed(engine) <= 100
    whole = (*prompt, engine._sequences[1].token_ids[16])
    fresh = _sequence(seq_id=2, token_ids=whole)
    alone = engine.execute(_plan(_slice(seq_id=2, num_tokens=17, blocks=(8, 9)), sequences=[fresh]))
    assert after.sampled[0].token_id == alone.sampled[0].token_id


def test_a_token_drawn_from_beyond_the_candidates_has_its_own_logprob():
    """Of nearly even logits over more tokens than are sorted at first, rows are drawn once more."""
    config = config_of("qwen3") | {"vocab_size": 3000}
    mx.random.seed(1)
    model = qwen3.Model(qwen3.ModelArgs.from_dict(config))
    mx.eval(model.parameters())
    driver = Driver(make_engine(model, config))
    requests = [
        driver.add(Request([seed], 6, SamplingParams(seed=seed, temperature=1.0, top_p=0.99, num_top_logprobs=1)))
        for seed in range(4)
    ]
    driver.run()
    for request in requests:
        logits = model(mx.array([request.tokens]))[0].astype(mx.float32)
        logprobs = np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
        for place, report in enumerate(request.logprobs):
            assert report.logprob == pytest.approx(logprobs[place, report.token_id], abs=1e-4)


class TestGuesses:
    """Of a sequence that repeats itself: the engine's report of each step."""

    @pytest.fixture
    def guessing(self, model):
        loaded = models.adapt(model, config_of("qwen3"))
        engine = Engine(
            loaded, twin_kernels(), memory_limit_bytes=1 << 30, speculation=Speculation(max_drafts=4, has_states=False)
        )
        engine.configure(configure_of(engine))
        sampling = SamplingParams(
            temperature=0.0, speculation=sampling_pb2.SPECULATION_NGRAM, logit_bias={7: 100.0}, num_top_logprobs=1
        )
        self.prompt = [7] * 14
        sequence = _sequence(token_ids=self.prompt, sampling=sampling, num_prompt_tokens=14)
        result = engine.execute(_plan(_slice(num_tokens=14, blocks=(5, 9, 11)), sequences=[sequence]))
        assert [(each.seq_id, each.num_drafts, each.num_wanted) for each in result.speculated] == [(1, 0, 4)]
        return engine

    def test_drafts_that_come_true_are_told_one_after_the_other(self, guessing):
        result = guessing.execute(_plan(_slice(start=14, num_tokens=1, blocks=(), max_drafts=3)))
        assert [each.token_id for each in result.sampled] == [7] * 4
        assert all(each.logprobs.token_id == 7 for each in result.sampled)
        assert [(each.num_drafts, each.num_wanted) for each in result.speculated] == [(3, 4)]
        (block,) = result.filled_blocks
        assert (block.block_index, block.block_hash) == (0, hash_blocks(ROOT, [7] * 16, 16)[0])

    def test_a_slice_runs_from_where_the_sequence_is_whatever_the_plan_thought(self, guessing):
        result = guessing.execute(_plan(_slice(start=21, num_tokens=1, blocks=(), max_drafts=4)))
        assert len(result.sampled) == 5
        with pytest.raises(ProtocolError, match="is before the last of the 20 known tokens"):
            guessing.execute(_plan(_slice(start=18, num_tokens=1, blocks=(), max_drafts=4)))

    def test_without_leave_nothing_is_guessed(self, guessing):
        result = guessing.execute(_plan(_slice(start=14, num_tokens=1, blocks=())))
        assert len(result.sampled) == 1
        assert [(each.num_drafts, each.num_wanted) for each in result.speculated] == [(0, 4)]

    def test_drafts_need_blocks(self, guessing):
        guessing.execute(_plan(_slice(start=14, num_tokens=1, blocks=(), max_drafts=4)))
        for _ in range(5):
            guessing.execute(_plan(_slice(start=60, num_tokens=1, blocks=(), max_drafts=4)))
        with pytest.raises(ProtocolError, match="needs 4 blocks but the block table of group 0 has 3"):
            guessing.execute(_plan(_slice(start=60, num_tokens=1, blocks=(), max_drafts=4)))
