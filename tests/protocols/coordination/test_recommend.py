"""The recommendation follows the measured shares, not noise, and takes back what brought nothing."""

from typing import Any

import pytest

from staleflow.protocols.coordination.recommend import (
    MIN_REPEATS,
    MIN_STEPS,
    Advice,
    Advisor,
    EngineLoad,
    Measured,
    StepTimes,
    recommend,
)
from staleflow.protocols.coordination.view import Cost

MEMORY_BOUND = Cost(k1=0.0, k2=0.01, k3=1e-5, k4=0.0)
"""A decode step takes 10 ms, whatever the number of samples."""


def engines(count: int, *, busy: float = 1.0, running: float = 16.0, slots: int = 16) -> tuple[EngineLoad, ...]:
    rate = busy * MEMORY_BOUND.rate(running, 0.0)
    each = EngineLoad(name="", busy=busy, running=running, slots=slots, tokens_per_s=rate, cost=MEMORY_BOUND)
    return (each,) * count


def measured(fleet: tuple[EngineLoad, ...], *times: float, **more: Any) -> Measured:
    """Steps of one second. ``times``: the seconds starved, repeated until there are enough steps."""
    steps = [StepTimes(seconds=1.0, starved=times[n % len(times)]) for n in range(MIN_STEPS)]
    settings: dict[str, Any] = {"version": 20, "batch_samples": 256, "max_staleness": 2, **more}
    return Measured(steps=tuple(steps), engines=fleet, **settings)


def change(given: Advice) -> tuple[str, int]:
    return given.action or "", given.count


def test_full_engines_that_starve_the_trainer_get_the_number_that_feeds_it() -> None:
    given = recommend(measured(engines(4), 0.5))
    assert change(given) == ("add", 4)
    assert given.steps_per_min == 60.0
    assert given.expected_steps_per_min == pytest.approx(120.0)
    assert given.sentence == (
        "add 4 engines: the trainer waits 50% of the time for groups that are being generated; 60 -> 120 steps/min"
    )


def test_a_large_fleet_changes_in_larger_strides() -> None:
    assert change(recommend(measured(engines(160), 0.5, batch_samples=10_000))) == ("add", 160)
    limited = measured(engines(160), 0.5, batch_samples=10_000, max_engines=175)
    assert change(recommend(limited)) == ("add", 15)
    assert change(recommend(measured(engines(160, running=8.0), 0.0, batch_samples=10_000))) == ("remove", 60)


def test_the_limit_of_the_user_is_respected() -> None:
    given = recommend(measured(engines(4), 0.5, max_engines=5))
    assert change(given) == ("add", 1)
    assert given.expected_steps_per_min == pytest.approx(75.0)
    given = recommend(measured(engines(4), 0.5, max_engines=4))
    assert change(given) == ("keep", 0)
    assert "rollout.elastic allows no more engines" in given.reason


def test_engines_with_free_places_are_limited_by_the_bound() -> None:
    given = recommend(measured(engines(4, busy=0.5, running=4.0), 0.5, max_staleness=0))
    assert change(given) == ("keep", 0)
    assert "staleness.max_staleness and the batch limit the samples in progress" in given.reason


def test_engines_that_take_turns_with_the_trainer_shorten_only_their_turn() -> None:
    given = recommend(measured(engines(4, busy=0.5), 0.5, max_staleness=0))
    assert change(given) == ("add", 4)
    assert given.expected_steps_per_min == pytest.approx(60 / 0.75)


def test_waits_for_stages_and_for_older_groups_ask_for_no_engine() -> None:
    steps = tuple(StepTimes(seconds=1.0, starved=0.0, blocked=0.3, pinned=0.3) for _ in range(MIN_STEPS))
    given = recommend(Measured(version=20, steps=steps, engines=engines(2), batch_samples=64, max_staleness=1))
    assert change(given) == ("keep", 0)


def test_a_noisy_share_asks_for_nothing() -> None:
    assert change(recommend(measured(engines(4), *[0.0] * 8, *[0.5] * 4))) == ("keep", 0)
    assert change(recommend(measured(engines(4), 0.16, 0.17))) == ("add", 1)
    assert change(recommend(measured(engines(4), 0.08))) == ("keep", 0)


def test_engines_at_a_part_of_their_rate_are_removed_down_to_the_headroom() -> None:
    given = recommend(measured(engines(8, running=8.0), 0.0))
    assert change(given) == ("remove", 3)
    given = recommend(measured(engines(8, running=8.0), 0.0, min_engines=6))
    assert change(given) == ("remove", 2)
    assert change(recommend(measured(engines(8), 0.0))) == ("keep", 0)


def test_a_slow_engine_is_removed_where_the_others_are_enough() -> None:
    slow = EngineLoad(name="", busy=0.5, running=4.0, slots=16, tokens_per_s=50.0, cost=Cost(k1=0, k2=0.04, k3=0, k4=0))
    given = recommend(measured((*engines(2, busy=0.2, running=4.0), slow), 0.2))
    assert change(given) == ("remove", 1)
    assert given.expected_steps_per_min == pytest.approx(75.0)
    assert change(recommend(measured((*engines(2), slow), 0.2))) == ("add", 1)


def test_an_engine_without_a_cost_model_counts_as_full_while_it_decodes() -> None:
    unknown = EngineLoad(name="", busy=1.0, running=1.0, tokens_per_s=100.0)
    assert change(recommend(measured((unknown,) * 4, 0.0))) == ("keep", 0)
    idle = EngineLoad(name="", busy=0.3, running=1.0, tokens_per_s=30.0)
    assert change(recommend(measured((idle,) * 4, 0.0))) == ("remove", 2)


def test_a_gpu_moves_to_the_side_that_limits_the_run() -> None:
    more = {"reshards": True, "train_s": 0.9}
    given = recommend(measured(engines(8, running=8.0), 0.0, ranks=2, **more))
    assert change(given) == ("to_training", 1)
    assert given.expected_steps_per_min == pytest.approx(60 / 0.7)
    assert "move a GPU from rollout to training at the next checkpoint" in given.sentence
    given = recommend(measured(engines(4), 0.5, ranks=4, max_engines=4, reshards=True, train_s=0.4))
    assert change(given) == ("to_rollout", 1)
    assert given.expected_steps_per_min == pytest.approx(75.0)
    alone = recommend(measured(engines(4), 0.5, ranks=1, max_engines=4, reshards=True, train_s=0.4))
    assert change(alone) == ("keep", 0)


def test_a_fleet_that_was_as_fast_with_fewer_engines_returns_to_them() -> None:
    assert change(recommend(measured(engines(4), 0.5), {2: 59.0})) == ("remove", 2)
    assert change(recommend(measured(engines(2), 0.5), {4: 60.0})) == ("keep", 0)


def test_a_removal_that_made_the_run_slower_is_taken_back_and_not_repeated() -> None:
    assert change(recommend(measured(engines(4, running=8.0), 0.0), {6: 70.0})) == ("add", 2)
    assert change(recommend(measured(engines(6, running=4.0), 0.0), {4: 50.0})) == ("remove", 1)


def test_nothing_is_recommended_before_enough_steps_agree() -> None:
    advisor, now = Advisor(), measured(engines(4), 0.5)
    few = Measured(version=3, steps=now.steps[1:], engines=now.engines, batch_samples=256, max_staleness=2)
    assert advisor.update(few) == Advice()
    for _ in range(MIN_REPEATS - 1):
        assert advisor.update(now) == Advice()
    assert change(advisor.update(now)) == ("add", 4)


def test_one_deviating_step_does_not_change_the_recommendation() -> None:
    advisor = Advisor()
    for _ in range(MIN_REPEATS):
        advisor.update(measured(engines(4), 0.5))
    assert change(advisor.update(measured(engines(4), 0.3))) == ("add", 4)
    for _ in range(MIN_REPEATS - 1):
        advisor.update(measured(engines(4), 0.3))
    assert change(advisor.newest) == ("add", 2)
