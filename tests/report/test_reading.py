"""The pages' facts about a run follow from its trace."""

from pathlib import Path
from typing import Any

import pytest

from staleflow.configs.errors import ConfigError
from staleflow.report.facts import Facts, Happening, Level, Levels, Spent
from staleflow.trace.reader import read_events
from tests.report.traces import PLAIN, attach, consume, event, opened, publish, read, save, sealed


def levels(events: list[dict[str, Any]]) -> list[Level]:
    return read(events).levels.points


def told(facts: Facts) -> list[str]:
    return [one.text for one in facts.happenings]


def test_a_step_is_told_with_its_wait_its_ages_and_the_group_that_came_last() -> None:
    facts = read(PLAIN)
    step, last = facts.steps[1], facts.steps[1].last
    assert (step.step, step.lineage, step.ages, step.tokens, step.masked_tokens) == (1, 0, {1: 1}, 10, 0)
    assert (step.sealed_s, step.consumed_s, step.waited_s) == (10, 11, 3)
    assert (step.writing_s, step.staging_s, step.queueing_s) == (1, 2, 0)
    assert last is not None
    assert (last.id, last.worker, last.version, last.reserved_s, last.occupied_s) == (2, "rollout-0.aa", 0, 7, 10)
    assert (facts.run, facts.began_unix_s, facts.seconds, facts.closed) == ("hand-1", 1000, 12, "finished")
    assert (facts.ages, facts.trained, facts.waited_s) == ({0: 1, 1: 1}, 20, 7)
    assert facts.pushed == Spent(groups=2, tokens=20)
    assert (facts.versions[0].loads_s, facts.versions[0].failed) == ([0.5], 0)
    assert facts.happenings == []


def test_groups_on_the_way_are_counted_by_state() -> None:
    points = [(point.at_s, point.leased, point.pushed, point.occupied, point.sealed) for point in levels(PLAIN)]
    assert points == [
        *((1, 0, 0, 0, 0), (1.5, 0, 0, 0, 0), (2, 0, 0, 0, 0)),
        *((4, 1, 0, 0, 0), (4.5, 0, 1, 0, 0), (5, 0, 0, 1, 0), (7, 0, 0, 0, 1)),
        *((8, 1, 0, 0, 0), (10, 0, 1, 0, 0), (11, 0, 0, 0, 1), (12, 0, 0, 0, 0)),
    ]


def test_a_rollback_takes_steps_back_and_their_groups_are_there_again() -> None:
    back = [
        event("join", 20, trainer="trainer.uu", trainer_term=2),
        event("rollback", 20, lineage=1, from_lineage=0, to_version=1),
        sealed(20, 3, 1, 2, 0, lineage=1),
        consume(21, 3, 1),
    ]
    facts = read([*PLAIN[:-1], *back])
    assert [(step.step, step.lineage) for step in facts.steps] == [(0, 0), (1, 1)]
    assert (facts.undone_steps, facts.undone_tokens) == (1, 10)
    assert facts.steps[1].waited_s == 0, "what it waited for at first is gone with the first try"
    assert told(facts) == ["trainer took over, term 2", "rolled back to version 1: 1 step is trained again"]
    assert facts.levels.points[-1] == Level(at_s=21, leased=0, pushed=0, occupied=0, sealed=1)


def test_versions_that_a_rollback_took_back_are_gone() -> None:
    back = [event("rollback", 20, lineage=1, from_lineage=0, to_version=1), publish(21, 2, lineage=1)]
    assert [(it.lineage, it.version) for it in read([*PLAIN[:-1], *back]).versions] == [(0, 0), (0, 1), (1, 2)]
    again = [event("rollback", 22, lineage=2, from_lineage=1, to_version=0), publish(23, 1, lineage=2)]
    assert [(it.lineage, it.version) for it in read([*PLAIN[:-1], *back, *again]).versions] == [(0, 0), (2, 1)]


def test_a_checkpoint_lets_go_of_what_no_rollback_can_reach() -> None:
    back = [event("rollback", 12, lineage=1, from_lineage=0, to_version=1), event("close", 13, why="x")]
    assert levels([*PLAIN[:-1], *back])[-1].occupied == 1
    assert levels([*PLAIN[:-1], event("checkpoint", 11.5, version=2), *back])[-1].occupied == 0


def test_who_came_and_went_is_told_and_who_left_at_the_end_is_not() -> None:
    facts = read(
        [
            *PLAIN[:-1],
            attach(12, "rollout-1.bb", "rollout"),
            event("detach", 13, worker="rollout-0.aa", role="rollout", why="silent"),
            attach(14, "rollout-0.cc", "rollout"),
            event("detach", 14.5, worker="rollout-0.cc", role="rollout", why="asked to end"),
            attach(15, "rollout-0.ee", "rollout"),
            event("detach", 15, worker="rollout-1.bb", role="rollout", why="drained"),
            opened(16, 2, reserved=3, occupied=1, version=2),
        ]
    )
    assert facts.happenings == [
        Happening(at_s=12, bad=False, text="rollout-1 joined (rollout)"),
        Happening(at_s=13, bad=True, text="rollout-0 fell silent"),
        Happening(at_s=14, bad=True, text="rollout-0 died: a new process has its name"),
        Happening(at_s=14.5, bad=False, text="rollout-0 left: asked to end"),
        Happening(at_s=15, bad=False, text="rollout-0 came back"),
        Happening(at_s=15, bad=True, text="the scheduler restarted, with 4 groups and version 2"),
    ]


def test_leases_that_one_worker_loses_together_are_one_line() -> None:
    lost = [
        part
        for group in (7, 8, 9)
        for part in (
            event("reserve", 12, group=group, lease=group, worker="rollout-3.dd", version=2),
            event("release", 12 + (group == 9) * 9, group=group, lease=group, tokens=5, why="expired"),
        )
    ]
    facts = read([*PLAIN[:-1], *sorted(lost, key=lambda one: one["m"])])
    assert told(facts) == [f"rollout-3 lost {many}: not heard from in time" for many in ("2 leases", "1 lease")]
    assert facts.released == {"expired": Spent(groups=3, tokens=15)}


def test_leases_that_are_lost_around_another_happening_leave_it_there() -> None:
    lost = [
        event("reserve", 12, group=7, lease=7, worker="rollout-3.dd", version=2),
        event("reserve", 12, group=8, lease=8, worker="rollout-3.dd", version=2),
        event("release", 13, group=7, lease=7, tokens=5, why="expired"),
        event("rollback", 13.5, lineage=1, from_lineage=0, to_version=2),
        event("release", 14, group=8, lease=8, tokens=5, why="expired"),
    ]
    assert read([*PLAIN[:-1], *lost]).happenings == [
        Happening(at_s=13, bad=True, text="rollout-3 lost 2 leases: not heard from in time"),
        Happening(at_s=13.5, bad=True, text="rolled back to version 2"),
    ]


def test_a_reboot_does_not_turn_time_back() -> None:
    rebooted = [
        event("publish", 0, lineage=0, version=2, bytes=1) | {"m": 5},
        event("close", 0, why="x") | {"m": 2 * 10**9},
    ]
    facts = read([*PLAIN[:-2], *rebooted])
    assert facts.versions[-1].published_s == 11
    assert facts.seconds == 13 - 5e-9


def test_a_curve_has_a_bounded_number_of_points_whatever_the_run_and_loses_nothing() -> None:
    curve = Levels(most=50)
    for at in range(10_001):
        curve.see(float(at), (at % 2, 0, 0, 7))
    points = curve.points
    assert 20 < len(points) <= 51
    begins = [0.0, *(point.at_s for point in points)]
    assert begins[-1] == 10_000
    area = sum(point.leased * (point.at_s - begin) for begin, point in zip(begins, points, strict=False))
    assert area == pytest.approx(5_000)
    assert {point.sealed for point in points} == {7.0}


def test_a_line_that_is_being_written_is_not_there_yet(tmp_path: Path) -> None:
    trace = save(tmp_path, PLAIN)
    whole = trace.read_bytes()
    trace.write_bytes(whole[:-20])
    assert list(read_events(trace)) == PLAIN[:-1]
    trace.write_bytes(whole[:-20] + b"\n")
    with pytest.raises(ConfigError, match=f"line {len(PLAIN)} is not JSON"):
        list(read_events(trace))


def test_a_seal_of_groups_that_nobody_saw_is_no_error() -> None:
    facts = read([opened(0), publish(1, 0), sealed(2, 1, 0, 99, 0), consume(3, 1, 0)])
    assert facts.steps[0].last is None


def test_a_run_that_ended_and_goes_on_lost_nobody() -> None:
    again = [
        opened(20, 2, reserved=1, occupied=2, version=2),
        attach(20, "rollout-0.bb", "rollout"),
        attach(21, "rollout-0.cc", "rollout"),
    ]
    facts = read([*PLAIN, *again])
    assert [(one.text, one.bad) for one in facts.happenings] == [
        ("the scheduler restarted, with 3 groups and version 2", False),
        ("rollout-0 came back", False),
        ("rollout-0 died: a new process has its name", True),
    ]
    assert read([*PLAIN[:-1], *again]).happenings[0].bad, "nobody asked it to end"
