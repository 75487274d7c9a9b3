"""What goes over the node protocol comes out as it went in."""

import pickle
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster import wire
from cluster.errors import BY_REASON, CideryError, InvalidRequest, MacLost, Overloaded, RequestTooLong
from cluster.event_wire import Batch, pack, unpack
from cluster.kv.events import BlocksRemoved, BlocksStored
from cluster.kv.hashing import BlockHash
from cluster.kv.memory import PoolResize
from cluster.kv.planner import plan_layout
from cluster.kv.spec import FullAttentionSpec, RecurrentStateSpec, StateTensor
from cluster.scheduling.plan import NewSequence, PromptLogprobs, Sampled, StepPlan
from cluster.scheduling.request import (
    NO_RULES,
    Finish,
    LogitRules,
    Pooling,
    Reading,
    Request,
    SamplingParams,
    Speculation,
    TokenLogprobs,
    Update,
)
from protos.cidery.node.v1 import node_pb2
from protos.cidery.v1 import sampling_pb2
from protos.cidery.worker.v1 import worker_pb2

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=20).map(tuple)
HASHES = st.binary(min_size=16, max_size=16).map(BlockHash)
FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
SAMPLING = st.builds(
    SamplingParams,
    temperature=FLOATS,
    top_k=st.integers(0, 2**31 - 1),
    top_p=FLOATS,
    min_p=FLOATS,
    seed=st.integers(0, 2**64 - 1),
    num_top_logprobs=st.none() | st.integers(0, 20),
)
SAMPLING = st.builds(
    replace,
    SAMPLING,
    xtc_probability=FLOATS,
    xtc_threshold=FLOATS,
    speculation=st.sampled_from(Speculation),
    rules=st.just(NO_RULES)
    | st.builds(
        LogitRules,
        frequency_penalty=FLOATS,
        presence_penalty=FLOATS,
        repetition_penalty=FLOATS,
        logit_bias=st.dictionaries(st.integers(0, 2**32 - 1), FLOATS, max_size=3).map(
            lambda biases: tuple(sorted(biases.items()))
        ),
        min_tokens=st.integers(0, 2**31 - 1),
        banned_sequences=st.lists(TOKENS, max_size=3).map(tuple),
        grammar=st.text(max_size=20),
    ),
)
LOGPROBS = st.builds(
    TokenLogprobs,
    st.integers(0, 2**32 - 1),
    FLOATS,
    st.lists(st.tuples(st.integers(0, 2**32 - 1), FLOATS), max_size=3).map(tuple),
)
ROOT = BlockHash(b"r" * 16)


@given(
    request=st.builds(
        Request,
        request_id=st.text(max_size=20),
        token_ids=TOKENS,
        num_prompt_tokens=st.integers(0, 2**31),
        block_hashes=st.lists(HASHES, max_size=4).map(tuple),
        max_tokens=st.integers(1, 2**31 - 1),
        sampling=SAMPLING,
        stop_token_ids=TOKENS,
        boundaries=TOKENS,
        tenant=st.text(max_size=20),
        tenant_weight=st.floats(0.01, 100.0),
        priority=st.integers(-100, 100),
        retention_priority=st.integers(-8, 8),
        pin_s=st.floats(0.0, 1e6),
        cache_salt=st.text(max_size=20),
        adapter=st.text(max_size=20),
        reading=st.none()
        | st.builds(Reading, num_top_logprobs=st.integers(0, 20), first_scored=st.integers(1, 2**31))
        | st.builds(Reading, pooling=st.sampled_from(Pooling)),
    )
)
def test_a_request_arrives_as_it_was_sent(request):
    message = node_pb2.ConnectRequest.FromString(
        wire.request_to_open(request, ROOT, ignore_eos=True).SerializeToString()
    )
    assert wire.request_from_open(message.open, eos_token_ids=[1, 2]) == request
    assert message.open.root_hash == ROOT


def test_the_models_end_tokens_join_the_clients_unless_ignored():
    request = Request("r", (1,), 1, (), 1, SamplingParams(), stop_token_ids=(7,))
    for ignore_eos, stops in ((False, (7, 2)), (True, (7,))):
        message = wire.request_to_open(request, ROOT, ignore_eos=ignore_eos).open
        assert wire.request_from_open(message, [2]).stop_token_ids == stops


@given(
    update=st.builds(
        Update,
        request_id=st.text(max_size=20),
        token_ids=TOKENS,
        logprobs=st.lists(LOGPROBS, max_size=3).map(tuple),
        finish=st.none() | st.sampled_from(Finish),
        num_cached_tokens=st.integers(0, 2**31),
        queue_s=st.floats(0, 1e6),
        prompt_logprobs=st.lists(LOGPROBS, max_size=3).map(tuple),
        embedding=st.lists(FLOATS, max_size=3).map(tuple),
    )
)
def test_an_update_arrives_as_it_was_sent(update):
    message = node_pb2.Update.FromString(wire.update_to_proto(update).SerializeToString())
    assert wire.update_from_proto(message) == update


def test_a_failure_of_the_row_becomes_the_requests():
    update = Update("r", (), (), Finish.ABORTED, 0, 0.0, failure="too complex")
    message = node_pb2.Update.FromString(wire.update_to_proto(update).SerializeToString())
    error = wire.failure_from_proto(message.failure)
    assert isinstance(error, InvalidRequest)
    assert "too complex" in str(error)


@pytest.mark.parametrize(
    "error", [Overloaded("full"), MacLost("gone"), RequestTooLong("9 + 9 = 18"), InvalidRequest("speculation", "bad")]
)
def test_a_failure_keeps_its_kind_and_words(error):
    arrived = wire.failure_from_proto(wire.failure_to_proto("r", error).failure)
    assert type(arrived) is type(error)
    assert str(arrived) == str(error)
    assert str(pickle.loads(pickle.dumps(error))) == str(error), "errors cross Ray by pickling"


def test_an_unknown_failure_is_quoted():
    arrived = wire.failure_from_proto(node_pb2.Failure(reason="ODD", message="words"))
    assert type(arrived) is CideryError
    assert "ODD: words" in str(arrived)


def test_every_failure_that_crosses_the_wire_has_a_reason_of_its_own():
    assert len(BY_REASON) == len(set(BY_REASON.values()))


EVENTS = st.lists(
    st.builds(
        lambda stored, group, first, parent, index: (
            BlocksStored(group, first, parent, index) if stored else BlocksRemoved(group, first)
        ),
        st.booleans(),
        st.integers(0, 3),
        HASHES,
        st.none() | HASHES,
        st.integers(0, 2**31),
    ),
    max_size=6,
).map(tuple)


@given(EVENTS, st.integers(0, 2**63 - 1))
def test_event_batches_arrive_as_they_were_sent(events, epoch):
    batch = Batch("mac-1", epoch, 7, events)
    arrived = unpack(pack(batch))
    assert arrived == batch
    assert [type(each) for each in arrived.events] == [type(each) for each in events]


def test_a_full_queue_s_hint_reaches_the_gateway():
    arrived = wire.failure_from_proto(wire.failure_to_proto("r", Overloaded("full", 7.5)).failure)
    assert isinstance(arrived, Overloaded)
    assert arrived.retry_after_s == 7.5


def test_resizes_and_their_moves_reach_the_worker():
    resize = PoolResize(1, 40, ((41, 3), (44, 7)))
    (message,) = wire.plan_to_proto(StepPlan(5, resizes=(resize,))).plan.resizes
    assert (message.pool, message.num_blocks) == (1, 40)
    assert [(move.source, move.target) for move in message.moves] == [(41, 3), (44, 7)]


def test_a_layout_reaches_the_worker_with_its_groups_and_pools():
    specs = [FullAttentionSpec(1, 8), RecurrentStateSpec("state", (StateTensor((3, 5), 4),)), FullAttentionSpec(1, 8)]
    layout = plan_layout(specs, kv_budget_bytes=1 << 20, max_model_len=64)
    message = wire.layout_to_proto(layout, BlockHash(b"r" * 16))
    assert [(group.pool, list(group.layers)) for group in message.groups] == [(0, [0, 2]), (1, [1])]
    assert list(message.num_blocks) == [pool.num_blocks for pool in layout.pools]
    assert (message.block_size, message.root_hash) == (16, b"r" * 16)


def test_what_is_wanted_of_a_prompt_reaches_the_worker():
    new = NewSequence(3, (1, 2, 3), b"", SamplingParams(), (), {}, 3, adapter="d", reads_only=True)
    for reading, first, pooling, num_top in (
        (None, 0, sampling_pb2.POOLING_UNSPECIFIED, None),
        (Reading(4, first_scored=2), 2, sampling_pb2.POOLING_UNSPECIFIED, 4),
        (Reading(pooling=Pooling.MEAN), 1, sampling_pb2.POOLING_MEAN, None),
    ):
        (message,) = wire.plan_to_proto(StepPlan(5, new_sequences=(replace(new, reading=reading),))).plan.new_sequences
        assert (message.first_scored, message.pooling) == (first, pooling)
        assert message.sampling.HasField("num_prompt_logprobs") == (num_top is not None)
        assert message.sampling.num_prompt_logprobs == (num_top or 0)
        assert (message.adapter, message.reads_only) == ("d", True)


def test_what_a_prompt_was_read_as_comes_back():
    message = worker_pb2.StepResult(
        sampled=[worker_pb2.Sampled(seq_id=3, is_read=True, embedding=[0.5, 2.0])],
        prompt_logprobs=[
            worker_pb2.PromptLogprobs(
                seq_id=3,
                start=7,
                logprobs=[-1, -2],
                num_top=2,
                top_token_ids=[5, 6, 7, 8],
                top_logprobs=[-1, -3, -2, -4],
            ),
            worker_pb2.PromptLogprobs(seq_id=4, start=1, logprobs=[-1, -2]),
        ],
    )
    result = wire.result_from_proto(message)
    assert result.sampled == (Sampled(3, 0, None, False, is_read=True, embedding=(0.5, 2.0)),)
    assert result.prompt_logprobs == (
        PromptLogprobs(3, 7, (-1.0, -2.0), (((5, -1.0), (6, -3.0)), ((7, -2.0), (8, -4.0)))),
        PromptLogprobs(4, 1, (-1.0, -2.0), ((), ())),
    )
