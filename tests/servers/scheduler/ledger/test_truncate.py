"""The interrupt of an overdue group reaches its current holder despite restarts and moves."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from staleflow.configs.schema import Staleness
from staleflow.protocols.consistency.limits import OnOverdue
from staleflow.protocols.wire.messages import Assign, Interrupt
from tests.servers.scheduler.table import Seat, Table
from tests.servers.scheduler.world import config


class Overdue:
    """A group of version 0 at instance a pins step 1 as soon as the last of two others is ready."""

    def __init__(self, run_dir: Path) -> None:
        staleness = Staleness(max_staleness=1, on_overdue=OnOverdue.TRUNCATE)
        self.table = Table(run_dir, msgspec.structs.replace(config(), staleness=staleness))
        self.a = Seat(self.table, "a", capacity=8)
        self.slow, *others = self.a.held.values()
        for assign in others[:2]:
            self.a.finish(assign.group)
        self.table.train()
        self.a.report()
        first, self._last = [group for group in self.a.holds() if group != self.slow.group][:2]
        self.a.finish(first)
        assert self.a.told == []

    def pins(self) -> None:
        """Finish the last of the other groups at the shard, without any report from the instance."""
        self.a.finish(self._last)
        assert self.table.interpreter.machine.pins() == (self.slow.group,)

    @property
    def interrupt(self) -> Interrupt:
        return Interrupt(lease=self.slow.lease)


@pytest.fixture
def overdue(tmp_path: Path) -> Iterator[Overdue]:
    made = Overdue(tmp_path / "run")
    yield made
    if made.slow.lease in made.a.held:
        made.a.finish(made.slow.group)
    assert made.table.interpreter.machine.next_step == 2
    made.table.close()


def test_it_is_told_at_once_and_once(overdue: Overdue) -> None:
    overdue.pins()
    assert overdue.a.told == [overdue.interrupt]
    overdue.table.after(500)
    overdue.a.report()
    assert overdue.a.told == [overdue.interrupt]


def test_what_pins_while_its_instance_is_silent_is_told_when_it_is_heard_again(overdue: Overdue) -> None:
    overdue.table.silent("a")
    overdue.pins()
    overdue.table.after(500)
    assert overdue.a.told == []
    overdue.a.report()
    assert overdue.a.told == [overdue.interrupt]


def test_what_was_ordered_just_before_the_silence_is_told_after_it(overdue: Overdue) -> None:
    overdue.table.endpoint.leave("a")
    overdue.pins()
    overdue.table.silent("a")
    overdue.a.report()
    assert overdue.a.told == [overdue.interrupt]


def test_a_lease_that_is_assigned_again_is_interrupted_again(overdue: Overdue) -> None:
    overdue.pins()
    lost: Assign = overdue.a.held.pop(overdue.slow.lease)
    overdue.a.report()
    assert overdue.a.held[overdue.slow.lease] == lost
    assert overdue.a.told == [overdue.interrupt] * 2


def test_a_restarted_scheduler_tells_it_again(overdue: Overdue) -> None:
    overdue.table.endpoint.leave("a")
    overdue.pins()
    overdue.table.restart()
    overdue.a.report()
    overdue.table.after(100)
    assert overdue.a.told == [overdue.interrupt]


def test_what_is_over_is_not_interrupted_when_its_instance_comes_back(overdue: Overdue) -> None:
    overdue.table.silent("a")
    overdue.pins()
    overdue.a.finish(overdue.slow.group)
    overdue.a.report()
    assert overdue.a.told == []
