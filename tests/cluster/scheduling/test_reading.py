"""Prompts that are read: their rows run whatever is cached, nothing is told twice, and nothing is drawn."""

from dataclasses import replace

import pytest

from cluster.scheduling.errors import InvalidRequest, ProtocolError, RequestTooLong
from cluster.scheduling.plan import PromptLogprobs
from cluster.scheduling.request import Finish, Pooling, Reading
from tests.cluster.kv.hybrid_machine import FULL, STATE, layout_of
from tests.cluster.scheduling.fake_worker import pooled
from tests.cluster.scheduling.rig import Rig, request_of, rows

SCORED = Reading(num_top_logprobs=1)
PROMPT = tuple(range(20))


def warm(rig):
    """The prompt's blocks are cached."""
    rig.add(request_of("warm", PROMPT, 2))
    rig.drain()
    return rig


@pytest.mark.parametrize(
    ("reading", "first_row"),
    [
        (SCORED, 0),
        (replace(SCORED, first_scored=1), 0),
        (replace(SCORED, first_scored=9), 8),
        (replace(SCORED, first_scored=12), 8),
        (replace(SCORED, first_scored=20), 19),
        (Reading(pooling=Pooling.MEAN), 0),
        (Reading(pooling=Pooling.CLS), 0),
        (Reading(pooling=Pooling.LAST), 19),
    ],
)
def test_a_cached_prefix_is_used_as_far_as_nothing_is_wanted_of_its_rows(reading, first_row):
    rig = warm(Rig())
    rig.add(request_of("r", PROMPT, 0, reading=reading))
    assert rows(rig.schedule())[0][0] == first_row
    rig.drain()
    assert rig.finished["r"] is Finish.LENGTH
    assert rig.updates["r"][-1].num_cached_tokens == first_row


def test_a_prompt_that_is_only_read_draws_nothing_and_leaves_its_blocks():
    rig = Rig()
    rig.add(request_of("r", PROMPT, 0, reading=SCORED))
    rig.drain()
    assert rig.tokens["r"] == []
    rig.add(request_of("next", PROMPT, 1))
    assert rows(rig.schedule())[0][0] == 19
    rig.drain()


def test_scores_come_chunk_by_chunk_before_the_answer():
    rig = Rig()
    rig.add(request_of("r", PROMPT, 2, reading=SCORED))
    rig.drain()
    assert [len(update.prompt_logprobs) for update in rig.updates["r"]] == [8, 8, 3, 0, 0]
    assert [len(update.token_ids) for update in rig.updates["r"]] == [0, 0, 0, 1, 1]


def test_a_preempted_prompt_goes_on_where_it_was_told():
    rig = Rig()
    rig.add(request_of("r", PROMPT, 1, reading=SCORED))
    rig.step()
    rig.step()
    rig.scheduler._roster.preempt(rig.scheduler._roster.by_id["r"])
    assert rows(rig.schedule())[0][0] == 16
    rig.drain()


def test_a_preempted_mean_starts_again():
    rig = Rig()
    rig.add(request_of("r", PROMPT, 0, reading=Reading(pooling=Pooling.MEAN)))
    rig.step()
    rig.scheduler._roster.preempt(rig.scheduler._roster.by_id["r"])
    assert rows(rig.schedule())[0][0] == 0
    rig.drain()
    assert rig.updates["r"][-1].embedding == pooled(Pooling.MEAN, PROMPT)


def test_scores_of_a_request_that_is_gone_are_forgotten():
    rig = Rig()
    rig.add(request_of("r", PROMPT, 0, reading=SCORED))
    rig.schedule()
    rig.abort("r")
    assert rig.apply() == []


@pytest.mark.parametrize("specs", [[FULL], [FULL, STATE]])
def test_readers_of_one_prompt_do_not_wait_for_each_other(specs):
    rig = Rig(layout=layout_of(specs, 200, max_model_len=64), max_num_batched_tokens=40, max_chunk_tokens=20)
    for name in "ab":
        rig.add(request_of(name, PROMPT, 0, reading=SCORED))
    assert len(rows(rig.schedule())) == 2
    rig.drain()


def test_a_read_prompt_may_fill_the_context_and_no_more():
    rig = Rig(max_model_len=20)
    rig.add(request_of("r", PROMPT, 0, reading=SCORED))
    rig.drain()
    with pytest.raises(RequestTooLong, match="a prompt of 21 tokens is longer than max_model_len 20"):
        rig.scheduler.add(request_of("s", (*PROMPT, 1), 0, reading=SCORED), 0.0)


@pytest.mark.parametrize(
    ("reading", "max_tokens", "message"),
    [
        (Reading(0, first_scored=0), 0, "first_scored must be 1 to 20"),
        (Reading(0, first_scored=21), 0, "first_scored must be 1 to 20"),
        (Reading(pooling=Pooling.MEAN), 1, "max_tokens must be 0"),
        (Reading(0, pooling=Pooling.MEAN), 0, "either pooled or scored"),
    ],
)
def test_readings_that_contradict_themselves_are_refused(reading, max_tokens, message):
    with pytest.raises(InvalidRequest, match=message):
        Rig().scheduler.add(request_of("r", PROMPT, max_tokens, reading=reading), 0.0)


@pytest.mark.parametrize(("start", "num"), [(2, 4), (1, 25)])
def test_scores_of_other_tokens_break_the_protocol(start, num):
    rig = Rig()
    rig.add(request_of("r", PROMPT, 0, reading=SCORED))
    rig.schedule()
    result = rig.results.popleft()
    wrong = PromptLogprobs(1, start, (0.0,) * num, ((),) * num)
    with pytest.raises(ProtocolError, match="wanted are those from 1 to 19"):
        rig.scheduler.apply(replace(result, prompt_logprobs=(wrong,)))


def test_scores_that_nobody_asked_for_break_the_protocol():
    rig = Rig()
    rig.add(request_of("r", PROMPT, 1))
    rig.schedule()
    wrong = PromptLogprobs(1, 1, (0.0,), ((),))
    with pytest.raises(ProtocolError, match="got log-probabilities of tokens 1 to 1"):
        rig.scheduler.apply(replace(rig.results.popleft(), prompt_logprobs=(wrong,)))


def test_rows_that_are_scored_are_bounded_in_a_step():
    rig = Rig(40, max_scored_tokens=10, max_num_batched_tokens=30, max_chunk_tokens=20, max_plans_in_flight=1)
    for name in "ab":
        rig.add(request_of(name, tuple(range(20, 40)) if name == "a" else PROMPT, 0, reading=SCORED))
    rig.add(request_of("c", tuple(range(50, 70)), 1))
    assert rows(rig.schedule()) == [(0, 10, False), (0, 20, True)]
    rig.apply()
    assert rows(rig.schedule()) == [(10, 10, True)]
    rig.apply()
    rig.drain()


def test_a_scored_prompt_waits_for_room_and_others_pass_it():
    rig = Rig(40, max_scored_tokens=8, max_num_batched_tokens=30, max_chunk_tokens=20, max_plans_in_flight=1)
    for name, first in (("a", 0), ("b", 20)):
        rig.add(request_of(name, tuple(range(first, first + 20)), 0, reading=SCORED))
    rig.add(request_of("c", tuple(range(50, 70)), 1))
    assert rows(rig.schedule()) == [(0, 8, False), (0, 20, True)]
    rig.apply()
    rig.drain()


def test_a_running_scored_prompt_sits_a_step_out_without_room():
    rig = Rig(40, max_num_batched_tokens=30, max_plans_in_flight=1)
    rig.add(request_of("a", tuple(range(40)), 0, reading=SCORED))
    rig.step()
    rig.add(request_of("b", tuple(range(50, 62)), 0, reading=SCORED))
    assert rows(rig.schedule()) == [(0, 8, False)], "it goes before the longer one"
    rig.apply()
    rig.scheduler._planner._config = replace(rig.config, max_scored_tokens=4)
    assert rows(rig.schedule()) == [(8, 4, True)]
    rig.apply()
    rig.drain()
