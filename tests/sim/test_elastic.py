"""Following the scheduler's recommendations balances a simulated run, and loses no token."""

from typing import Any

import pytest
from msgspec.structs import replace

from staleflow.configs.elastic import Elastic
from staleflow.configs.schema import Config, Coordination
from staleflow.configs.simulation import Fleet
from staleflow.sim.result import Result
from staleflow.sim.simulate import simulate
from tests.sim.configs import config

MAX_IDLE = 0.15
"""Accepted share of the last steps in which the trainer waits."""


def elastic(*, most: int, least: int = 1, **settings: Any) -> Config:
    """Engines of four slots, which write six trajectories a second; a step trains eight."""
    base = config(slots=4, lengths={"sigma": 0.3}, **settings)
    rollout = replace(base.rollout, elastic=Elastic(min_workers=least, max_workers=most))
    return replace(base, rollout=rollout, coordination=Coordination())


def idle(result: Result, last: int = 20) -> float:
    """Share of the last steps in which the trainer did not train."""
    rows = result.steps[-last:]
    return 1 - sum(row.ended_s - row.began_s for row in rows) / (rows[-1].ended_s - rows[0].began_s)


def rate(result: Result, first: int, last: int) -> float:
    """Steps a second from step ``first`` to step ``last``."""
    return (last - first) / (result.steps[last].ended_s - result.steps[first].ended_s)


def alive(result: Result) -> set[str]:
    """Names of the engines that were there at the end."""
    end_s = max(engine.ended_s for engine in result.engines)
    return {engine.name.partition(".")[0] for engine in result.engines if engine.ended_s == end_s}


@pytest.mark.parametrize(("max_staleness", "train_s"), [(1, 0.8), (2, 0.8)])
def test_a_starved_trainer_gets_engines_until_it_is_fed(max_staleness: int, train_s: float) -> None:
    result = simulate(elastic(most=8, engines=1, steps=80, train_s=train_s, max_staleness=max_staleness))
    assert 1 < len(alive(result)) < 8
    assert rate(result, 4, 10) < 0.8 / train_s
    assert idle(result) < MAX_IDLE
    assert (result.violations, result.discarded) == (0, 0.0)


def test_engines_that_the_run_does_not_need_leave_without_loss() -> None:
    result = simulate(elastic(most=6, engines=6, steps=70, train_s=2.0))
    assert alive(result) == {"rollout-0"}
    assert idle(result) < MAX_IDLE
    assert (result.violations, result.discarded) == (0, 0.0)


def test_an_engine_that_is_too_slow_for_the_others_leaves() -> None:
    kinds = [Fleet(count=1, speed=0.25), Fleet(count=2)]
    result = simulate(elastic(most=3, least=2, engines=3, steps=40, train_s=2.0, fleet=kinds))
    assert alive(result) == {"rollout-1", "rollout-2"}
    assert rate(result, 4, 16) < 0.8 / 2.0
    assert idle(result, 10) < MAX_IDLE


def test_a_synchronous_run_keeps_engines_that_the_batch_cannot_fill() -> None:
    result = simulate(elastic(most=6, engines=4, steps=40, train_s=1.0, max_staleness=0))
    assert len(alive(result)) == len(result.engines) == 4


def test_without_limits_the_scheduler_changes_nothing() -> None:
    result = simulate(elastic(most=0, engines=1, steps=30, train_s=0.4))
    assert len(result.engines) == 1
    assert idle(result) > 0.3
