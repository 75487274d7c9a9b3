"""How much of prompts a step takes beside rows that decode."""

from collections import deque
from dataclasses import replace

import pytest

from cluster.scheduling.config import SchedulerConfig
from cluster.scheduling.pace import StepPace
from tests.cluster.scheduling.fake_worker import undisturbed
from tests.cluster.scheduling.rig import Rig, request_of

_MOST = 512


def _paced(target_s: float, *, token_s: float, plain_s: float, num_steps: int = 50, num_tokens: int = 256) -> StepPace:
    """After steps with and without prompts on a Mac that is that fast."""
    pace = StepPace(target_s)
    for _ in range(num_steps):
        pace.step_ran(0, plain_s)
        pace.step_ran(num_tokens, plain_s + num_tokens * token_s)
    return pace


def test_nothing_is_held_back_before_anything_was_timed():
    pace = StepPace(0.5)
    assert pace.max_prefill_tokens(_MOST) == _MOST
    pace.step_ran(256, 0.0)
    pace.step_ran(8, 10.0)
    assert pace.max_prefill_tokens(_MOST) == _MOST


def test_a_fast_mac_takes_all_that_the_budget_allows():
    assert _paced(0.5, token_s=1 / 2000, plain_s=0.03).max_prefill_tokens(_MOST) == _MOST


def test_a_slow_mac_takes_what_it_has_time_for():
    """200 tokens/s, a decode step of 0.09 s: 0.41 s are left, which is 82 tokens, five blocks."""
    pace = _paced(0.5, token_s=1 / 200, plain_s=0.09)
    assert pace.max_prefill_tokens(_MOST) == 80
    assert pace.max_prefill_tokens(50) == 50


def test_a_prompt_gets_on_where_every_token_is_dear():
    assert _paced(0.5, token_s=0.1, plain_s=0.1).max_prefill_tokens(_MOST) == 64


def test_a_step_that_is_long_without_prompts_may_take_twice_as_long():
    """A decode step of 2 s: another 2 s of prompts, 200 tokens."""
    assert _paced(0.5, token_s=0.01, plain_s=2.0).max_prefill_tokens(_MOST) == 192


def test_steps_with_few_tokens_do_not_make_tokens_look_dear():
    """What is learned from its own small chunks doesn't make them smaller and smaller."""
    pace = _paced(0.5, token_s=1 / 400, plain_s=0.1)
    for _ in range(200):
        num_tokens = pace.max_prefill_tokens(_MOST)
        pace.step_ran(num_tokens, 0.1 + num_tokens / 400)
        pace.step_ran(0, 0.1)
    assert pace.max_prefill_tokens(_MOST) == pytest.approx(160, abs=16)


def test_a_step_that_the_machine_held_up_is_forgotten():
    pace = _paced(0.5, token_s=1 / 2000, plain_s=0.03)
    pace.step_ran(256, 30.0)
    assert pace.max_prefill_tokens(_MOST) == 64
    for _ in range(60):
        pace.step_ran(64, 0.03 + 64 / 2000)
    assert pace.max_prefill_tokens(_MOST) == _MOST


def test_a_target_that_is_no_time_is_refused():
    with pytest.raises(ValueError, match="target_step_s must be positive, got 0"):
        SchedulerConfig(max_model_len=64, target_step_s=0)


class _TimedRig(Rig):
    """A Mac on which a prompt's token takes a hundredth of a second and a step without any 0.05 s."""

    def apply(self):
        tokens = self.num_tokens.popleft()
        self.results[0] = replace(self.results[0], run_s=0.05 + 0.01 * tokens)
        return super().apply()

    def schedule(self):
        plan = super().schedule()
        if plan is not None:
            self.num_tokens.append(sum(s.num_tokens for s in plan.slices if s.num_tokens > 1))
        return plan


def test_a_prompt_takes_shorter_steps_beside_rows_that_decode_and_long_ones_alone():
    rig = _TimedRig(
        num_blocks=2000, max_model_len=4000, max_num_batched_tokens=512, max_chunk_tokens=512, target_step_s=1.0
    )
    rig.num_tokens = deque()
    rig.add(request_of("decodes", (1, 2), 30))
    for _ in range(4):
        rig.step()
    rig.add(request_of("long", tuple(range(3900)), 2))
    beside, alone = [], []
    while rig.scheduler.has_work():
        if not rig.can_schedule or (plan := rig.schedule()) is None:
            rig.apply()
            continue
        num_prefill = max((s.num_tokens for s in plan.slices if s.num_tokens > 1), default=0)
        if num_prefill:
            (beside if len(plan.slices) > 1 else alone).append(num_prefill)
    # The first ones are planned before anything is known; from then on a step takes its second.
    assert beside[:2] == [511, 511]
    assert set(beside[2:]) == {80}
    # When the other one has ended, nobody waits.
    assert set(alone[:-1]) == {512}
    assert rig.tokens["decodes"] == undisturbed(rig.requests["decodes"], 4000)
