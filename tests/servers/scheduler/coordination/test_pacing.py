"""Waits of the trainer are counted by cause: too few groups, or a pinned step."""

import pytest

from staleflow.protocols.consistency import events
from staleflow.protocols.consistency.effects import Delivered, Sealed
from staleflow.protocols.consistency.ids import GroupId, LeaseId, Lineage, Segment, Step, Version, WorkerId
from staleflow.protocols.consistency.limits import Limits
from staleflow.protocols.consistency.machine import Machine
from staleflow.protocols.coordination.admission import HISTORY_WEIGHT, Pace
from staleflow.servers.scheduler.coordination.pacing import Pacing

SHA = "0" * 64


class Run:
    """A ledger, and a trainer that waits while ``asked`` is set: for its current batch, or for the one ``ahead``."""

    def __init__(self, batch_size: int = 1) -> None:
        limits = Limits(max_staleness=1, batch_size=batch_size)
        self.machine = Machine(limits)
        self.machine.apply(events.Join(trainer=WorkerId("t"), lineage=Lineage(0), version=Version(0)), 0)
        self.machine.apply(events.Publish(trainer_term=self.machine.trainer_term, sha=SHA, nbytes=1), 0)
        self.asked = False
        self.ahead = 0
        self.pacing = Pacing(limits, lambda: Step(self.machine.version + self.ahead) if self.asked else None)
        self._groups = 0
        self.sealed: list[Sealed] = []

    def begin(self) -> tuple[GroupId, LeaseId]:
        self._groups += 1
        group = GroupId(self._groups)
        self.machine.apply(events.Reserve(group=group, worker=WorkerId("w"), version=self.machine.version), 0)
        held = self.machine.group(group)
        assert held is not None
        return group, held.lease

    def finish(self, group: GroupId, lease: LeaseId) -> None:
        segment = Segment(Lineage(0), self.machine.version, 1)
        push = events.Push(
            group=group, lease=lease, worker=WorkerId("w"), shard=0, sha=SHA, nbytes=1, truncated=False,
            segments=(segment,), sequence_tokens=1,
        )  # fmt: skip
        self.machine.apply(push, 0)
        told = self.machine.apply(events.Occupy(group=group, lease=lease), 0)
        self.sealed += [effect for effect in told if isinstance(effect, Sealed)]

    def publish(self) -> None:
        """Let the trainer consume the oldest sealed batch and publish its version."""
        batch = self.sealed.pop(0)
        consume = events.Consume(
            batch=batch.batch, step=batch.step, trainer_term=self.machine.trainer_term, sha=SHA, nbytes=1
        )
        told = self.machine.apply(consume, 0)
        self.sealed += [effect for effect in told if isinstance(effect, Sealed)]

    def look(self, now_ms: int) -> Pace:
        self.pacing.update(self.machine, now_ms)
        return self.pacing.pace


def test_a_wait_for_more_groups_is_starvation() -> None:
    run = Run()
    run.finish(*run.begin())
    run.look(0)
    run.publish()
    run.look(10_000)  # the first step includes startup, so it does not count
    run.asked = True
    run.look(12_000)
    run.finish(*run.begin())
    run.asked = False
    run.look(15_000)
    run.publish()
    pace = run.look(20_000)
    assert (pace.seconds, pace.starved_s, pace.pinned_s) == (10.0, 3.0, 0.0)


def test_the_first_step_shows_the_cost_of_gathering_from_its_first_lease_on() -> None:
    run = Run()
    run.asked = True
    run.look(0)
    run.look(60_000)  # engines load the first version
    held = run.begin()
    run.look(61_000)
    run.finish(*held)
    run.asked = False
    run.look(71_000)
    run.publish()
    pace = run.look(80_000)
    assert (pace.gather_s, pace.seconds, pace.lead) == (10.0 / 2, 0.0, 2.0)


def test_a_wait_with_enough_of_them_is_for_those_that_pin() -> None:
    run = Run(batch_size=2)
    first, second, third, fourth = [run.begin() for _ in range(4)]
    run.finish(*first)
    run.finish(*second)
    run.look(0)
    run.publish()
    run.look(10_000)
    for held in (run.begin(), run.begin(), third):
        run.finish(*held)
    run.asked = True
    run.look(11_000)
    run.finish(*fourth)
    run.asked = False
    run.look(17_000)
    run.publish()
    pace = run.look(20_000)
    assert (pace.seconds, pace.starved_s, pace.pinned_s) == (10.0, 0.0, 6.0)
    assert pace.lead == 0.0


def test_a_trainer_that_asks_ahead_while_it_trains_does_not_wait() -> None:
    run = Run()
    for now_ms in (0, 20_000):
        run.finish(*run.begin())
        run.look(now_ms)
        run.publish()
    assert run.look(40_000).starved_s == 0.0
    assert run.pacing.waits is False


def test_what_is_under_way_is_counted_over_time_in_batches() -> None:
    run = Run(batch_size=2)
    for now_ms in (0, 10_000):
        run.finish(*run.begin())
        run.finish(*run.begin())
        run.look(now_ms)
        run.publish()
    run.look(20_000)
    first, second = run.begin(), run.begin()
    run.look(30_000)
    run.finish(*first)
    run.look(34_000)
    run.finish(*second)
    run.look(40_000)
    run.publish()
    pace = run.look(45_000)
    last_s = 25.0
    assert pace.under_way_s - HISTORY_WEIGHT * 0.0 == pytest.approx((2 * 4 + 1 * 6) / 2)
    assert pace.seconds == pytest.approx(HISTORY_WEIGHT * 10.0 + last_s)


def test_a_batch_is_trained_from_its_delivery_until_its_version_is_out() -> None:
    run = Run()
    run.finish(*run.begin())
    run.look(0)
    assert run.pacing.trains(0) is False
    deliver(run)
    assert run.pacing.trains(0) is True
    run.publish()
    assert run.pacing.trains(1) is False
    run.finish(*run.begin())
    deliver(run)
    assert run.pacing.trains(1) is True
    run.asked = True
    run.look(1)
    assert run.pacing.trains(1) is False


def test_a_trainer_that_publishes_and_waits_for_the_batch_ahead_counts_as_waiting_and_as_training() -> None:
    run = Run()
    run.finish(*run.begin())
    run.look(0)
    run.publish()
    run.finish(*run.begin())
    deliver(run)
    run.look(10_000)
    run.asked, run.ahead = True, 1
    run.look(14_000)
    assert run.pacing.waits
    assert run.pacing.trains(1), "its current batch is not used up before its version is published"
    run.asked = False
    run.look(16_000)
    run.publish()
    pace = run.look(20_000)
    assert pace.starved_s == pytest.approx(2.0)


def deliver(run: Run) -> None:
    batch = run.sealed[0]
    term = run.machine.trainer_term
    for effect in run.machine.apply(events.Deliver(batch=batch.batch, trainer_term=term, rank=0), 0):
        assert isinstance(effect, Delivered)
        run.pacing.on_delivered(effect)
