"""An instance that fails every group is held back and costs no prompt; a prompt that causes failures is given up."""

from pathlib import Path

import pytest

from staleflow.protocols.consistency.effects import ReleaseWhy
from staleflow.protocols.consistency.ids import GroupId, Step
from staleflow.servers.scheduler.coordination.backoff import HOLD_AFTER, MAX_TRIES
from tests.servers.scheduler.table import TICK_MS, Seat, Table
from tests.servers.scheduler.world import config

BROKEN = "no module named judge"


def fail(seat: Seat, groups: list[int], *, hopeless: bool = False) -> None:
    for group in groups:
        assign = seat.assign(group)
        del seat.held[assign.lease]
        seat.table.release(assign, ReleaseWhy.ABORTED, seat.name, detail=BROKEN, hopeless=hopeless)
    seat.report()


def sealed(table: Table) -> bool:
    machine = table.interpreter.machine
    return machine.sealed_batch(Step(machine.version)) is not None


@pytest.mark.parametrize("hopeless", [False, True])
def test_an_instance_that_fails_everything_burns_few_leases_and_no_prompt(tmp_path: Path, hopeless: bool) -> None:
    table = Table(tmp_path / "run", config(batch_size=8, max_staleness=2))
    good, bad = Seat(table, "good", capacity=4), Seat(table, "bad", capacity=16)
    failed: list[int] = []
    for _ in range(60 * 1_000 // (4 * TICK_MS)):
        failed += bad.holds()
        fail(bad, bad.holds(), hopeless=hopeless)
        for group in good.holds():
            good.finish(group)
        while sealed(table):
            table.train()
        table.after(4 * TICK_MS)
        bad.report()
        good.report()
    assert HOLD_AFTER <= len(failed) <= 4 * 16, "its places twice or three times over, then one group after each hold"
    assert table.interpreter.machine.version > 10, "the run goes on"
    assert [group for group in failed if table.interpreter.machine.retired(GroupId(group))] == []
    table.close()


def test_an_instance_that_works_again_is_served_as_before(tmp_path: Path) -> None:
    table = Table(tmp_path / "run", config(batch_size=8, max_staleness=2))
    Seat(table, "good", capacity=4)
    bad = Seat(table, "bad", capacity=8)
    for _ in range(3):
        fail(bad, bad.holds())
    assert bad.held == {}
    table.after(1_000 + TICK_MS)
    bad.report()
    assert len(bad.held) == 1, "it is tried with one group"
    bad.finish(bad.holds()[0])
    table.after(TICK_MS)
    bad.report()
    assert len(bad.held) == 8


def test_one_instance_that_refuses_many_prompts_is_not_held_where_none_does_better(tmp_path: Path) -> None:
    table = Table(tmp_path / "run", config(batch_size=8, max_staleness=2))
    seat = Seat(table, "a", capacity=4)
    for _ in range(10):
        fail(seat, seat.holds(), hopeless=True)
        assert len(seat.held) == 4


def test_an_instance_that_works_on_many_groups_is_not_held_for_the_prompts_that_it_refuses(tmp_path: Path) -> None:
    """Failures come at once and groups take long: no group has been pushed yet."""
    table = Table(tmp_path / "run", config(batch_size=64))
    seat = Seat(table, "a", capacity=64)
    Seat(table, "b", capacity=4)
    for _ in range(2 * HOLD_AFTER):
        fail(seat, seat.holds()[:1])
    assert len(seat.held) == 64


def test_a_prompt_that_fails_at_two_instances_is_given_up(tmp_path: Path) -> None:
    table = Table(tmp_path / "run", config(batch_size=1, max_staleness=4))
    seats = [Seat(table, name, capacity=1) for name in ("a", "b")]
    (bad,) = seats[0].holds()
    failed: list[str] = []
    for _ in range(200):
        for seat in seats:
            for group in seat.holds():
                if group == bad:
                    failed.append(seat.name)
                    fail(seat, [group])
                else:
                    seat.finish(group)
            while sealed(table):
                table.train()
            seat.report()
        if table.interpreter.machine.retired(GroupId(bad)):
            break
    assert table.interpreter.machine.retired(GroupId(bad))
    assert set(failed) == {"a", "b"} or len(failed) == 2 * MAX_TRIES


def fail_in_a_stage(table: Table, seat: Seat, failing: int) -> None:
    """Push every group of ``seat``; the stages fail group ``failing`` and finish the others."""
    for assign in list(seat.held.values()):
        if assign.group == failing:
            table.push(assign, seat.name)
            table.release(assign, ReleaseWhy.ABORTED, "trajectories-0")
            del seat.held[assign.lease]
        else:
            seat.finish(assign.group)
    while sealed(table):
        table.train()
    seat.report()


def test_a_prompt_that_always_fails_is_given_up_although_the_scheduler_restarts_after_each_failure(
    tmp_path: Path,
) -> None:
    table = Table(tmp_path / "run", config(batch_size=2))
    seat = Seat(table, "a", capacity=4)
    failing, failures = seat.holds()[0], 0
    for _ in range(200):
        if failing in seat.holds():
            failures += 1
            fail_in_a_stage(table, seat, failing)
            table.restart()
            seat.report()
        else:
            fail_in_a_stage(table, seat, failing)
        if table.interpreter.machine.retired(GroupId(failing)):
            break
    assert failures == MAX_TRIES
    assert table.interpreter.machine.retired(GroupId(failing))
    assert len(table.interpreter.prompts.tries) == 0, "nothing is stored about a group that was given up"
    table.close()


def test_a_resumed_run_starts_without_tries_since_its_reward_may_be_another_one(tmp_path: Path) -> None:
    table = Table(tmp_path / "run", config(batch_size=2))
    table.restart("monday")
    seat = Seat(table, "a", capacity=4)
    fail_in_a_stage(table, seat, failing := seat.holds()[0])
    assert table.interpreter.prompts.tries[GroupId(failing)].failures == 1
    table.restart("monday")
    assert table.interpreter.prompts.tries[GroupId(failing)].failures == 1
    table.restart("tuesday")
    assert table.interpreter.prompts.tries[GroupId(failing)].failures == 0
    table.close()
