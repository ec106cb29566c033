"""Lanes computed from a trace and the stages' times show which process worked when, and how stages overlap."""

import json
from pathlib import Path
from typing import Any

import pytest

from staleflow.monitor.lanes import Lane, Lanes, Span, overlaps, stage_lines
from staleflow.trace.fold import Fold
from tests.report.traces import consume, event, lines, opened


def reserve(at_s: float, lease: int, worker: str) -> dict[str, Any]:
    return event("reserve", at_s, group=lease, lease=lease, worker=worker, version=0)


def push(at_s: float, lease: int) -> dict[str, Any]:
    return event("push", at_s, group=lease, lease=lease, segments=[])


def release(at_s: float, lease: int) -> dict[str, Any]:
    return event("release", at_s, group=lease, lease=lease, tokens=0, why="aborted")


def seal(at_s: float, batch: int, step: int) -> dict[str, Any]:
    fields: dict[str, Any] = {"lineage": 0, "step": step, "members": [], "tokens": 0, "masked_tokens": 0}
    return event("seal", at_s, batch=batch, **fields)


def deliver(at_s: float, batch: int, step: int) -> dict[str, Any]:
    return event("deliver", at_s, batch=batch, step=step)


def lanes(events: list[dict[str, Any]], stages: list[dict[str, Any]]) -> list[Lane]:
    fold = Fold()
    found = Lanes(fold)
    for line in fold.over(lines(events)):
        found.see(line)
    return found.all(stages)


def stage(name: str, worker: str, begin_s: float, end_s: float) -> dict[str, Any]:
    return {"stage": name, "worker": f"{worker}.ab", "groups": 1, "begin_s": 100 + begin_s, "end_s": 100 + end_s}


EVENTS = [
    opened(0),
    reserve(1, 1, "rollout-0.xy"),
    reserve(1, 2, "rollout-1.xy"),
    push(3, 1),
    release(4, 2),
    release(5, 1),
    seal(6, 1, 0),
    deliver(6, 1, 0),
    deliver(6.5, 1, 0),
    consume(8, 1, 0),
]
STAGES = [
    stage("judge", "judge-0", 3, 5),
    stage("judge", "judge-1", 4, 6),
    stage("length", "length-0", 2, 3.5),
    stage("length", "length-0", 5.5, 9),
    stage("mix", "mix-0", 6, 7),
]


def test_a_lane_is_what_one_worker_had_and_when() -> None:
    assert lanes(EVENTS, STAGES) == [
        Lane("engine", "rollout-0", [Span(1, 3)]),
        Lane("engine", "rollout-1", [Span(1, 4)]),
        Lane("judge", "judge-0", [Span(3, 5)]),
        Lane("judge", "judge-1", [Span(4, 6)]),
        Lane("length", "length-0", [Span(2, 3.5), Span(5.5, 9)]),
        Lane("mix", "mix-0", [Span(6, 7)]),
        Lane("trainer", "trainer", [Span(6, 8)]),
    ]


def test_a_batch_that_is_delivered_ahead_is_worked_on_after_the_one_before() -> None:
    ahead = [*EVENTS[:-1], seal(7, 2, 1), deliver(7, 2, 1), EVENTS[-1], consume(9, 2, 1)]
    assert lanes(ahead, [])[-1] == Lane("trainer", "trainer", [Span(6, 8), Span(8, 9)])


def test_a_worker_that_was_started_again_goes_on_in_its_lane() -> None:
    again = [*EVENTS, reserve(9, 3, "rollout-0.zz"), push(10, 3)]
    assert lanes(again, [])[0] == Lane("engine", "rollout-0", [Span(1, 3), Span(9, 10)])


@pytest.mark.parametrize("night_s", [8 * 3600, -90], ids=["the same boot", "another boot"])
def test_the_night_between_two_incarnations_is_no_time_at_all(night_s: float) -> None:
    morning = [
        opened(8 + night_s),
        reserve(9 + night_s, 3, "rollout-0.zz"),
        push(10 + night_s, 3),
    ]
    last = [stage("judge", "judge-0", 7, 9), stage("judge", "judge-0", 9 + night_s, 12 + night_s)]
    drawn = {lane.worker: lane.spans for lane in lanes([*EVENTS, *morning], last)}
    assert drawn["rollout-0"] == [Span(1, 3), Span(9, 10)]
    assert drawn["judge-0"] == [Span(7, 8), Span(9, 12)], "what ended in the night ended with the evening"


def test_what_two_stages_did_at_the_same_time_is_counted_once() -> None:
    assert overlaps(lanes(EVENTS, STAGES)) == [("judge", "length", 1.0), ("judge", "mix", 0.0), ("length", "mix", 1.0)]


def left_behind(run_dir: Path) -> Path:
    """A run directory with these files."""
    (run_dir / "trace.jsonl").write_text("".join(json.dumps(one) + "\n" for one in EVENTS))
    (run_dir / "stages-0.old.jsonl").write_text(json.dumps(STAGES[0]) + "\n")
    (run_dir / "stages-0.jsonl").write_text("".join(json.dumps(one) + "\n" for one in STAGES[1:3]) + '{"torn')
    (run_dir / "stages-1.jsonl").write_text("".join(json.dumps(one) + "\n" for one in STAGES[3:]))
    return run_dir


def test_the_lines_of_all_trajectory_servers_count_and_a_torn_one_does_not(tmp_path: Path) -> None:
    assert list(stage_lines(left_behind(tmp_path))) == STAGES
