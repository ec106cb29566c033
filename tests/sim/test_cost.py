"""The closed forms from steps to seconds and from seconds to steps agree."""

import random

import pytest

from staleflow.configs.simulation import Simulated
from staleflow.sim.cost import StepCost


def some(draw: random.Random) -> StepCost:
    return StepCost(
        k1=draw.choice([0.0, 1e-9, 7.28e-8, 1e-4]),
        k2=draw.choice([1e-3, 0.0115]),
        k3=draw.choice([0.0, 1.2e-4]),
        k4=draw.choice([0.0, 9e-4]),
    )


def test_the_time_of_many_steps_is_the_sum_of_their_times() -> None:
    cost = StepCost(k1=0.01, k2=0.5, k3=0.2, k4=0.1)
    one_by_one = sum(cost.steps_s(1, 7, 100 + 7 * step) for step in range(30))
    assert cost.steps_s(30, 7, 100) == pytest.approx(one_by_one)
    assert cost.steps_s(0, 7, 100) == 0.0


def test_the_number_of_steps_is_the_least_that_lasts_so_long() -> None:
    draw = random.Random(0)
    for _ in range(5000):
        cost, running, kv = some(draw), draw.randint(1, 300), draw.randint(0, 500_000)
        steps = draw.randint(1, 20_000)
        seconds = cost.steps_s(steps, running, kv)
        near = 1e-6
        assert [cost.steps_until(s, running, kv) for s in (seconds - near, seconds, seconds + near)] == [
            steps,
            steps,
            steps + 1,
        ]


def test_no_time_is_no_step() -> None:
    assert StepCost(k1=0.0, k2=1.0, k3=0.0, k4=0.0).steps_until(0.0, 3, 0) == 0


def test_a_faster_engine_is_faster_in_everything() -> None:
    slow = StepCost.of(Simulated(k1=1e-6, k2=0.01, k3=1e-4, k4=1e-3), prefill_s=1e-4)
    fast = StepCost.of(Simulated(k1=1e-6, k2=0.01, k3=1e-4, k4=1e-3), prefill_s=1e-4, speed=2.0)
    assert fast.tokens_per_s(9, 1000) == pytest.approx(2 * slow.tokens_per_s(9, 1000))
    assert fast.prefill_s == slow.prefill_s / 2
