"""The history between polls stays correct after a rollback and after a restart of the scheduler."""

import dataclasses
from typing import Any

from staleflow.monitor.history import History
from staleflow.monitor.model import Board, board
from staleflow.supervisor.view import Snapshot
from tests.monitor.world import shown


def line(step: int, lineage: int = 0) -> dict[str, Any]:
    """A step whose score is a tenth of its number, plus one hundred in a later lineage."""
    return {"step": step, "lineage": lineage, "reward/mean": step / 10 + 100 * lineage, "loss": float(step)}


def looked(history: History, *lines: dict[str, Any], newest: dict[str, Any] | None = None, **status: Any) -> Board:
    shot: Snapshot = dataclasses.replace(shown(metrics=newest or {}, **status), lines=lines)
    history.see(shot)
    return board("run", shot, history)


def test_steps_that_were_taken_back_are_shown_no_more() -> None:
    history = History()
    before = looked(history, *(line(step) for step in range(21)))
    assert (before.reward, before.loss, len(before.rewards)) == (2.0, 20.0, 21)
    after = looked(history, line(10, 1))
    assert (after.reward, after.loss) == (101.0, 10.0)
    assert after.rewards == (*(step / 10 for step in range(10)), 101.0)
    assert looked(history, line(11, 1)).rewards[-2:] == (101.0, 101.1), "a lineage is counted once"


def test_an_evaluation_before_the_first_step_of_a_lineage_leaves_the_step_before_it() -> None:
    history = History()
    said = [line(step) | {"reward/eval": step / 4} for step in range(3)]
    assert looked(history, *said).held_out == (0.0, 0.5)
    back = looked(history, {"step": 0, "lineage": 1, "reward/eval": 0.125})
    assert (back.rewards, back.losses, back.held_out) == ((0.0,), (0.0,), (0.125, 0.125))


def test_a_status_from_before_the_rollback_brings_nothing_back() -> None:
    history = History()
    it = looked(history, line(19), line(20), line(10, 1), newest=line(20))
    assert (it.reward, it.rewards) == (101.0, (101.0,))


def test_the_time_left_is_that_of_the_steps_since_the_rollback() -> None:
    history = History()
    for at_s, version in ((10.0, 18), (20.0, 19), (30.0, 20), (31.0, 10), (500.0, 10)):
        looked(history, at_s=at_s, version=version)
    assert history.left_s(100) is None
    for at_s, version in ((33.0, 11), (35.0, 12)):
        it = looked(history, at_s=at_s, version=version)
    assert it.left_s == 88 * 2.0


def test_a_scheduler_that_came_back_does_not_know_the_ages_of_one_step_and_its_pace_is_shown() -> None:
    history = History()
    known = {"off_policy/mean": 1.5, "off_policy/max": 3, "staleness/masked_token_ratio": 0.25}
    looked(history, line(1) | known | {"perf/tokens_per_second": 900.0})
    it = looked(history, line(2) | {"perf/tokens_per_second": 40.0})
    assert (it.trained_per_s, it.staleness_mean, it.masked, it.staleness_max) == (40.0, None, None, 3)
    it = looked(history, {"step": 2, "reward/eval": 0.5})
    assert it.trained_per_s == 40.0, "what is no step's has no pace"
    assert looked(history, line(3) | known | {"perf/tokens_per_second": 800.0}).masked == 0.25
