"""Steps whose graphs are built while the step before runs: what they draw, and what becomes of those that had ended."""

import time

import pytest
from mlx import nn

from protos.cidery.v1.sampling_pb2 import SamplingParams
from protos.cidery.worker.v1 import worker_pb2 as pb
from tests.worker.driver import make_engine
from tests.worker.families import config_of, make_model
from worker import inspection
from worker.engine import Engine
from worker.errors import ProtocolError

_GREEDY = SamplingParams(temperature=0.0, num_top_logprobs=3)
_PROMPTS = {1: [3, 1, 4, 1, 5], 2: list(range(20, 43))}
_NUM_NEW = 14


pytestmark = pytest.mark.usefixtures("no_compile")


@pytest.fixture(scope="module")
def model():
    return make_model("qwen3")


@pytest.fixture
def engine(model) -> Engine:
    return make_engine(model, config_of("qwen3"))


def _plans(stop_token_ids=(), *, new_ids=_PROMPTS, num_new=_NUM_NEW, **sampling) -> list[pb.StepPlan]:
    """Prompts in whole, then a row of each in every step."""
    params = SamplingParams()
    params.CopyFrom(_GREEDY)
    params.MergeFrom(SamplingParams(**sampling))
    first = pb.StepPlan(step_id=1)
    for place, seq_id in enumerate(new_ids):
        prompt = _PROMPTS[seq_id]
        first.new_sequences.add(
            seq_id=seq_id,
            token_ids=prompt,
            num_prompt_tokens=len(prompt),
            sampling=params,
            stop_token_ids=stop_token_ids,
            block_tables=[pb.GroupBlocks(group=0, block_ids=range(1 + 4 * place, 5 + 4 * place))],
        )
        first.slices.add(seq_id=seq_id, start=0, num_tokens=len(prompt), samples=True)
    plans = [first]
    for step in range(1, num_new):
        plans.append(pb.StepPlan(step_id=step + 1))
        for seq_id in new_ids:
            plans[-1].slices.add(seq_id=seq_id, start=len(_PROMPTS[seq_id]) + step - 1, num_tokens=1, samples=True)
    return plans


def _ahead(engine: Engine, plans: list[pb.StepPlan]) -> list[pb.StepResult]:
    results: list[pb.StepResult] = []
    for plan in plans:
        engine.submit(plan, results.append)
    engine.drain(results.append)
    return results


def _one_by_one(engine: Engine, plans: list[pb.StepPlan]) -> list[pb.StepResult]:
    return [engine.execute(plan) for plan in plans]


def _told(results: list[pb.StepResult]) -> list[tuple]:
    """All but how long it took."""
    return [
        (
            result.step_id,
            [(each.seq_id, each.token_id, each.stopped, each.failure) for each in result.sampled],
            [(each.seq_id, each.block_index, each.block_hash) for each in result.filled_blocks],
            list(result.skipped_seq_ids),
        )
        for result in results
    ]


def _logprobs(results: list[pb.StepResult]) -> list[float]:
    sampled = [each.logprobs for result in results for each in result.sampled]
    return [value for each in sampled for value in (each.logprob, *(top.logprob for top in each.top))]


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 0.8, "seed": 5},
        {"temperature": 1.5, "seed": 6, "top_p": 0.9, "top_k": 40},
        {"repetition_penalty": 1.6},
        {"frequency_penalty": 1.0, "min_tokens": 5},
        {"banned_sequences": [{"token_ids": [7, 8]}], "logit_bias": {3: 1.0}},
    ],
    ids=["greedy", "drawn", "truncated", "repetition", "counts", "bans"],
)
def test_results_are_those_of_one_step_after_the_other(model, engine, sampling):
    """Log-probabilities and block hashes included."""
    plans = _plans(**sampling)
    expected = _one_by_one(make_engine(model, config_of("qwen3")), plans)
    results = _ahead(engine, plans)
    assert _told(results) == _told(expected)
    # Where an array begins in memory decides how a CPU adds it up.
    assert _logprobs(results) == pytest.approx(_logprobs(expected), abs=1e-5)


def test_a_result_comes_once_the_next_plan_was_taken_and_not_later(engine):
    """One step runs at a time, and a plan's result is there once the next plan was taken."""
    reported: list[int] = []
    for plan in _plans():
        engine.submit(plan, lambda result: reported.append(result.step_id))
        assert engine.is_running
        assert reported == list(range(1, plan.step_id))
    engine.drain(lambda result: reported.append(result.step_id))
    assert not engine.is_running
    assert reported[-1] == _NUM_NEW


def test_rows_of_an_ended_sequence_are_skipped_though_they_ran(model, engine):
    """It draws its stop token while the next step's graph has its row already; others are unharmed."""
    plans = _plans()
    free = _one_by_one(make_engine(model, config_of("qwen3")), plans)
    answer = [sampled.token_id for result in free for sampled in result.sampled if sampled.seq_id == 1]
    stop = answer[4]
    expected = _one_by_one(make_engine(model, config_of("qwen3")), _plans([stop]))
    results = _ahead(engine, _plans([stop]))
    assert _told(results) == _told(expected)
    ended = answer.index(stop)
    assert 1 in results[ended + 1].skipped_seq_ids
    assert all(sampled.seq_id != 1 for result in results[ended + 1 :] for sampled in result.sampled)
    assert all(block.seq_id != 1 for result in results[ended + 1 :] for block in result.filled_blocks)


def test_a_sequence_released_while_its_row_runs_ends_quietly(engine):
    plans = _plans(num_new=3)
    plans.append(pb.StepPlan(step_id=4, released_seq_ids=[1]))
    plans[-1].slices.add(seq_id=2, start=len(_PROMPTS[2]) + 2, num_tokens=1, samples=True)
    results = _ahead(engine, plans)
    assert [sampled.seq_id for sampled in results[2].sampled] == [1, 2]
    assert [sampled.seq_id for sampled in results[3].sampled] == [2]


def test_a_row_two_tokens_ahead_is_refused(engine):
    """One token is being drawn; the one behind it can't have a row yet."""
    engine.submit(_plans()[0], lambda result: None)
    beyond = pb.StepPlan(step_id=2)
    beyond.slices.add(seq_id=1, start=len(_PROMPTS[1]) + 1, num_tokens=1, samples=True)
    with pytest.raises(ProtocolError, match=r"slice \[6, 7\) reaches beyond the 6 known tokens"):
        engine.submit(beyond, lambda result: None)


def test_timings_add_up_to_the_time_that_passed(engine):
    """A step's time begins when the one before ends, so nothing is counted twice."""
    started_s = time.perf_counter()
    results = _ahead(engine, _plans())
    passed_s = time.perf_counter() - started_s
    assert sum(result.timings.run_s for result in results) <= passed_s
    assert all(result.timings.run_s > 0 for result in results)
    assert all(result.timings.idle_s == 0 for result in results[2:])


def test_reset_forgets_a_step_that_runs(engine):
    engine.submit(_plans()[0], lambda result: None)
    engine.reset()
    assert not engine.is_running


@pytest.mark.parametrize("case", ["dbrx", "mixtral"])
def test_who_looks_at_numbers_while_its_graph_is_built_gets_them(case):
    """dbrx asks in Python which experts its tokens go to; the graph of a step must wait for the tokens then."""
    assert inspection.reads_values(make_model(case)) == (case == "dbrx")
    plans = _plans()
    config = config_of(case)
    expected = _one_by_one(make_engine(make_model(case), config), plans)
    results = _ahead(make_engine(make_model(case), config), plans)
    assert _told(results) == _told(expected)
    assert _logprobs(results) == pytest.approx(_logprobs(expected), abs=1e-5)


def test_a_model_whose_source_is_not_there_is_taken_to_look():
    namespace: dict = {"Module": nn.Module, "__name__": "nowhere.to.be_found"}
    exec("class Model(Module):\n    pass", namespace)
    assert inspection.reads_values(namespace["Model"]())
