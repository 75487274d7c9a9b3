"""Each Mac's speeds are learnt from its steps, whatever they were taken for at first."""

import random
from collections.abc import Sequence

import pytest

from cluster.routing.speed import StepCosts, StepModel, StepSample, assumed_costs, shape_of

FAST = StepCosts(0.02, 1 / 2_000, 1 / 2_000 / 20_000, 0.001, 1e-6)


def seconds_of(costs: StepCosts, num_prefill: int, context: float, num_decoding: int, decode_context: int) -> float:
    compute_s = num_prefill * (costs.token_s + costs.context_s * context)
    return max(costs.step_s, compute_s) + costs.row_s * num_decoding + costs.row_context_s * decode_context


def samples(
    costs: StepCosts,
    seed: int,
    count: int,
    *,
    outliers: float = 0.0,
    extra_s: float = 0.0,
    chunks: Sequence[int] = (0, 0, 64, 512, 2_048),
) -> list[StepSample]:
    """Noise of a tenth; now and then a step takes twenty times as long; `extra_s` on top of those with prefill."""
    chance = random.Random(seed)
    made = []
    for _ in range(count):
        num_prefill = chance.choice(chunks)
        num_decoding = chance.randint(0 if num_prefill else 1, 16)
        shape = (num_prefill, chance.random() * 60_000, num_decoding, int(num_decoding * chance.random() * 40_000))
        noise = (1 + chance.gauss(0, 0.1)) * (20 if chance.random() < outliers else 1)
        made.append(StepSample(*shape, (seconds_of(costs, *shape) + extra_s * (num_prefill > 0)) * noise))
    return made


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("outliers", [0.0, 0.03])
@pytest.mark.parametrize("assumed", [50.0, 500.0, 20_000.0])
def test_predicts_within_a_tenth_whatever_it_assumed(seed: int, outliers: float, assumed: float) -> None:
    model = StepModel(assumed_costs(assumed))
    for sample in samples(FAST, seed, 1_500, outliers=outliers):
        model.observe(sample)
    for shape in [(512, 0.0, 0, 0), (512, 30_000.0, 4, 8_000), (2_048, 1_000.0, 0, 0), (0, 0.0, 8, 80_000)]:
        assert seconds_of(model.costs, *shape) == pytest.approx(seconds_of(FAST, *shape), rel=0.15)


def test_short_chunks_do_not_make_prefill_look_cheap() -> None:
    """A Mac that is hardly asked for long prompts: where weights take longer to read, tokens cost nothing more."""
    model = StepModel(assumed_costs(500.0))
    for _ in range(3):
        model.observe(StepSample(256, 128.0, 0, 0, seconds_of(FAST, 256, 128.0, 0, 0)))
    for number in range(400):
        num_prefill = 16 if number % 2 else 0
        shape = (num_prefill, 8.0 * (num_prefill > 0), 1 + number % 4, 1_000)
        model.observe(StepSample(*shape, seconds_of(FAST, *shape)))
    assert model.costs.prefill_tokens_per_s == pytest.approx(2_000.0, rel=0.15)
    assert model.costs.decode_step_s == pytest.approx(FAST.decode_step_s, rel=0.1)


def test_a_mac_whose_steps_add_up_is_learnt_too() -> None:
    """It reads no weights while it computes: the law is not exact then, but it is for chunks of the usual size."""
    model = StepModel(assumed_costs(500.0))
    for sample in samples(FAST, 5, 1_500, extra_s=FAST.step_s, chunks=(0, 256, 256, 256, 100)):
        model.observe(sample)
    for shape in [(256, 1_000.0, 0, 0), (256, 30_000.0, 4, 8_000), (256, 60_000.0, 0, 0)]:
        assert seconds_of(model.costs, *shape) == pytest.approx(seconds_of(FAST, *shape) + FAST.step_s, rel=0.15)


def test_the_first_steps_replace_what_was_assumed_and_one_stall_does_not() -> None:
    model = StepModel(assumed_costs(500.0))
    model.observe(StepSample(512, 256.0, 0, 0, 60.0))
    for _ in range(4):
        model.observe(StepSample(512, 256.0, 0, 0, 0.128))
    assert model.costs.prefill_tokens_per_s == pytest.approx(4_000.0, rel=0.01)


def test_a_mac_that_grew_hot_is_followed() -> None:
    model = StepModel(assumed_costs(500.0))
    slow = StepCosts(*(2 * weight for weight in FAST.weights))
    for sample in [*samples(FAST, 1, 800), *samples(slow, 2, 800)]:
        model.observe(sample)
    for shape in [(512, 30_000.0, 4, 8_000), (2_048, 10_000.0, 0, 0), (0, 0.0, 8, 80_000)]:
        assert seconds_of(model.costs, *shape) == pytest.approx(seconds_of(slow, *shape), rel=0.2)


def test_what_no_step_tells_apart_stays_in_its_bounds() -> None:
    """Hours of the same decode step say nothing of prefill, and must not let its cost run away."""
    model = StepModel(assumed_costs(500.0))
    for sample in samples(FAST, 3, 500):
        model.observe(sample)
    before = model.costs
    chance = random.Random(4)
    for _ in range(5_000):
        model.observe(StepSample(0, 0.0, 4, 4_000, seconds_of(FAST, 0, 0.0, 4, 4_000) * (1 + chance.gauss(0, 0.1))))
    assert model.costs.token_s == pytest.approx(before.token_s, rel=0.3)
    assert model.costs.decode_step_s == pytest.approx(FAST.decode_step_s, rel=0.15)


def test_no_cost_becomes_nothing() -> None:
    model = StepModel(assumed_costs(500.0))
    for number in range(2_000):
        model.observe(StepSample(512, 256.0, number % 5, 0, 1.0))
    assert min(model.costs.weights) > 0.0


@pytest.mark.parametrize("sample", [StepSample(0, 0.0, 0, 0, 1.0), StepSample(64, 0.0, 0, 0, 0.0)])
def test_steps_that_say_nothing_are_not_counted(sample: StepSample) -> None:
    model = StepModel(assumed_costs(500.0))
    model.observe(sample)
    assert model.num_observed == 0
    assert model.costs == assumed_costs(500.0)


def test_the_assumed_shape_prefills_as_fast_as_it_says() -> None:
    assert assumed_costs(500.0).prefill_tokens_per_s == pytest.approx(500.0, rel=0.02)
    assert assumed_costs(500.0).decode_step_s == pytest.approx(0.035, rel=0.1)


def told(costs: StepCosts, shapes: list[tuple[int, float, int, int]]) -> StepModel:
    model = StepModel(assumed_costs(500.0))
    for shape in shapes * 2:
        model.observe(StepSample(*shape, seconds_of(costs, *shape)))
    return model


SHORT = [(256, 128.0, 0, 0), (256, 384.0, 0, 0), *[(0, 0.0, 1, 512)] * 4]
LONG = [*SHORT, (256, 60_000.0, 0, 0), (256, 20_000.0, 8, 100_000), (0, 0.0, 16, 400_000)]


def test_what_one_mac_has_not_learnt_is_as_with_the_others() -> None:
    """Short prompts don't tell what long contexts cost: a Mac that had none must not look slow at them for ever."""
    half = StepCosts(*(2 * weight for weight in FAST.weights))
    knows, new = told(FAST, LONG * 10), told(half, SHORT)
    assert knows.certainties[2] > 0.9
    assert new.certainties[2] < 0.5
    at = (256, 60_000.0, 0, 0)
    truth = seconds_of(half, *at)
    assert seconds_of(new.costs, *at) == pytest.approx(truth, rel=0.5)
    assert seconds_of(new.costs, *at) != pytest.approx(truth, rel=0.1), "by itself it is wrong"
    shape = shape_of([knows, new])
    assert seconds_of(new.costs_in(shape), *at) == pytest.approx(truth, rel=0.1)
    assert seconds_of(knows.costs_in(shape), *at) == pytest.approx(seconds_of(FAST, *at), rel=0.05)


def test_what_nobody_knows_is_as_assumed() -> None:
    models = [told(FAST, SHORT), told(FAST, SHORT)]
    for model in models:
        assert model.costs_in(shape_of(models)).weights == pytest.approx(model.costs.weights, rel=0.02)


def test_all_costs_can_be_scaled() -> None:
    assert FAST.times(1.0) is FAST
    assert FAST.times(2.0).weights == tuple(2 * weight for weight in FAST.weights)
