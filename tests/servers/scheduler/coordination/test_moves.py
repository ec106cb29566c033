"""The scheduler moves a group to another instance, which continues from the samples written so far."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from staleflow.configs.schema import Config, Coordination
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.consistency.ids import LeaseId, Version, WorkerId
from staleflow.protocols.coordination.decide import Strategies
from staleflow.protocols.coordination.migration import MIN_AGE_MS
from staleflow.protocols.coordination.view import Flight, Order, Snapshot
from staleflow.protocols.wire.messages import Assign, Detach, RegisterYield, Yield
from staleflow.servers.scheduler.coordination import cycle
from staleflow.servers.scheduler.coordination.moves import MOVE_TIMEOUT_MS
from tests.servers.scheduler.table import Seat, Table
from tests.servers.scheduler.world import config


def moving() -> Config:
    """Return a configuration with batches of one group and staleness 1: two groups at once."""
    return msgspec.structs.replace(config(batch_size=1), coordination=Coordination(migration="idle"))


@pytest.fixture
def table(tmp_path: Path) -> Iterator[Table]:
    made = Table(tmp_path / "run", moving())
    yield made
    made.close()


class Crowd:
    """Instance a has both groups, of which one waits for a slot; b attached later and is idle."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self.a = Seat(table, "a")
        self.b = Seat(table, "b")
        self.a.report()
        assert (len(self.a.held), self.b.held) == (2, {})
        self.newest = self.a.held[max(self.a.held)]

    def told(self) -> Assign:
        """Let the scheduler order a to give up its newest group; return the assignment."""
        self.a.report(running=2, waiting=2, slots=2)
        self.table.after(MIN_AGE_MS + 600)
        self.a.report(tokens_per_s=1.0)
        assert self.a.told == [Yield(lease=self.newest.lease)]
        return self.newest

    def write_with_newer_weights(self) -> None:
        """Let a finish its other group and load version 1, which b does not."""
        (other,) = (assign for assign in self.a.held.values() if assign != self.newest)
        self.a.finish(other.group)
        self.b.loads = False
        self.table.train()
        self.a.report()

    def moved(self) -> Assign:
        """Complete that move; return the assignment of b."""
        left = self.told()
        assert self.a.give_up(left) is None
        self.b.report()
        (assign,) = self.b.held.values()
        return assign


def test_a_group_moves_in_one_step_to_who_has_nothing_to_do_and_finds_what_was_written(table: Table) -> None:
    crowd = Crowd(table)
    left, arrived = crowd.newest, crowd.moved()
    assert arrived == msgspec.structs.replace(left, lease=LeaseId(left.lease + 1), partial=left.lease)
    assert crowd.a.told == [Yield(lease=left.lease)], "what it gave up is not aborted"
    assert table.interpreter.totals.counts.moves == 1
    crowd.a.report()
    crowd.b.report()
    assert table.interpreter.machine.leases_of(WorkerId("b")) == ((arrived.group, arrived.lease),)


def test_what_was_written_when_a_group_moved_is_known_until_it_is_begun_anew(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of the two running samples gets half a token per second, for slightly more than five seconds."""
    seen: dict[LeaseId, Flight] = {}

    def look(snapshot: Snapshot, _: Strategies) -> list[Order]:
        seen.update((flight.lease, flight) for flight in snapshot.flights)
        return []

    crowd = Crowd(table)
    crowd.a.report(tokens_per_s=1.0)
    arrived = crowd.moved()
    with monkeypatch.context() as patch:
        patch.setattr(cycle, "decide", look)
        table.after(600)
        crowd.b.report(running=2)
    (stayed,) = (seen[lease] for lease in crowd.a.held)
    assert 0.5 * 5 <= seen[arrived.lease].written <= 0.5 * 6
    assert stayed.written == 0.0
    table.ask("b", Detach(worker=WorkerId("b"), why="test"))
    crowd.a.report()
    again = crowd.a.assign(arrived.group)
    monkeypatch.setattr(cycle, "decide", look)
    table.after(600)
    crowd.a.report(running=3)
    assert seen[again.lease].written == 0.0


def test_the_lease_that_was_given_up_pushes_nothing_any_more(table: Table) -> None:
    crowd = Crowd(table)
    left, arrived = crowd.newest, crowd.moved()
    assert table.push(left, "a") is Code.STALE_LEASE
    assert table.push(left, "b") is Code.STALE_LEASE
    assert table.push(arrived, "a") is Code.STALE_LEASE
    assert table.push(arrived, "b") is None
    assert table.push(left, "a") is Code.STALE_LEASE
    table.occupy(arrived)


def test_said_again_because_the_answer_was_lost_a_yield_has_its_effect_once(table: Table) -> None:
    crowd = Crowd(table)
    left = crowd.newest
    crowd.moved()
    assert crowd.a.give_up(left) is Code.STALE_LEASE
    assert table.interpreter.totals.counts.moves == 1


def test_nobody_yields_to_nobody(table: Table) -> None:
    crowd = Crowd(table)
    assert crowd.a.give_up(crowd.newest) is Code.DENIED, "it was not told to"
    assert crowd.newest.lease in crowd.a.held


def test_a_worker_may_give_up_a_group_unasked_and_it_goes_where_most_places_are_free(table: Table) -> None:
    a, full, free = Seat(table, "a"), Seat(table, "full", capacity=1), Seat(table, "free", capacity=3)
    a.report()
    first, second = a.held.values()
    assert a.give_up(first, any_target=True) is None
    free.report()
    arrived = free.assign(first.group)
    assert arrived == msgspec.structs.replace(first, lease=LeaseId(second.lease + 1), partial=first.lease)
    assert table.push(first, "a") is Code.STALE_LEASE
    assert table.push(arrived, "free") is None
    assert a.give_up(second, any_target=True) is None
    full.report()
    free.report()
    assert (full.holds(), free.holds()) == ([], [first.group, second.group])


def test_a_group_that_is_given_up_unasked_stays_without_another_worker(table: Table) -> None:
    a = Seat(table, "a")
    a.report()
    first, second = a.held.values()
    assert a.give_up(first, any_target=True) is Code.DENIED
    Seat(table, "b")
    table.service.drain()
    assert a.give_up(first, any_target=True) is Code.DENIED, "the run drains"
    assert a.holds() == [first.group, second.group]
    assert table.push(first, "a") is None


@pytest.fixture
def wide(tmp_path: Path) -> Iterator[Table]:
    """A run with batches of two groups: four at once."""
    made = Table(tmp_path / "run", config(batch_size=2))
    yield made
    made.close()


def test_a_group_that_is_given_up_unasked_gets_the_next_place_of_a_full_worker(wide: Table) -> None:
    a, b = Seat(wide, "a", capacity=2), Seat(wide, "b", capacity=1)
    a.report()
    b.report()
    left, kept = a.held.values()
    (own,) = b.held.values()
    for _ in range(2):
        assert a.give_up(left, any_target=True) is Code.BUSY
    b.finish(own.group)
    wide.after(600)
    b.report()
    assert b.holds() == [], "there is room for one more group, but the place is reserved"
    assert a.give_up(left, any_target=True) is None
    b.report()
    assert b.holds() == [left.group]
    assert a.give_up(kept, any_target=True) is Code.BUSY
    b.finish(left.group)
    wide.train()
    wide.after(600)
    b.report()
    assert b.holds() == []
    wide.after(MOVE_TIMEOUT_MS)
    b.report()
    assert len(b.held) == 1, "the reservation of a worker that does not ask again ends"
    assert kept.group in a.holds()


def test_a_leaving_worker_gets_no_groups_neither_new_ones_nor_those_of_others(wide: Table) -> None:
    a, b = Seat(wide, "a", capacity=2), Seat(wide, "b", capacity=4)
    a.report()
    (left, _), (own, _) = a.held.values(), b.held.values()
    b.leaving = True
    b.report()
    b.finish(own.group)
    wide.after(600)
    b.report()
    assert len(b.held) == 1
    assert a.give_up(left, any_target=True) is Code.DENIED
    b.leaving = False
    b.report()
    assert a.give_up(left, any_target=True) is None


def test_a_group_that_is_given_up_unasked_never_goes_to_older_weights(table: Table) -> None:
    crowd = Crowd(table)
    crowd.write_with_newer_weights()
    assert (crowd.a.stats.version, crowd.b.stats.version) == (1, 0)
    assert crowd.a.give_up(crowd.newest, version=1, any_target=True) is Code.DENIED
    assert crowd.a.give_up(crowd.newest, version=0, any_target=True) is None


def test_when_the_target_of_an_ordered_move_has_older_weights_the_worker_may_ask_for_another(table: Table) -> None:
    crowd = Crowd(table)
    left = crowd.told()
    crowd.write_with_newer_weights()
    newer = Seat(table, "newer", capacity=1)
    assert crowd.a.give_up(left, version=1, any_target=True) is None
    newer.report()
    assert newer.holds() == [left.group]


@pytest.mark.parametrize("gone", ["silent", "detached", "replaced"])
def test_when_the_target_is_gone_the_group_stays(table: Table, gone: str) -> None:
    crowd = Crowd(table)
    left = crowd.told()
    match gone:
        case "silent":
            table.silent("b")
        case "detached":
            table.ask("b", Detach(worker=WorkerId("b"), why="test"))
        case _:
            table.attach("b.2", "rollout", capacity=4)
            table.ask("b", Detach(worker=WorkerId("b"), why="test"))
    assert crowd.a.give_up(left) is Code.DENIED
    assert table.push(left, "a") is None
    table.occupy(left)


def test_a_target_whose_weights_are_older_than_what_wrote_last_is_none(table: Table) -> None:
    """a has loaded version 1 meanwhile and written with it; b has not."""
    crowd = Crowd(table)
    left = crowd.told()
    crowd.write_with_newer_weights()
    assert (crowd.a.stats.version, crowd.b.stats.version) == (1, 0)
    assert crowd.a.give_up(left, version=1) is Code.DENIED
    assert table.push(left, "a", [(0, 3), (1, 3)]) is None


def test_a_target_with_newer_weights_goes_on_with_them(table: Table) -> None:
    crowd = Crowd(table)
    left = crowd.told()
    (other,) = (assign for assign in crowd.a.held.values() if assign != left)
    crowd.a.finish(other.group)
    table.train()
    crowd.b.report()
    assert crowd.b.stats.version == 1
    assert crowd.a.give_up(left, version=0) is None
    crowd.b.report()
    arrived = crowd.b.assign(left.group)
    assert arrived.version == 0, "its oldest token is of version 0, wherever it goes on"
    assert table.push(arrived, "b", [(0, 3), (1, 3)]) is None


def test_an_order_that_takes_too_long_is_over_and_the_group_stays(table: Table) -> None:
    crowd = Crowd(table)
    left = crowd.told()
    crowd.a.report(waiting=0)
    table.after(MOVE_TIMEOUT_MS)
    crowd.a.report()
    assert table.interpreter.machine.group(left.group).lease == left.lease  # type: ignore[union-attr]
    assert crowd.a.give_up(left) is Code.DENIED


def test_a_group_under_way_is_not_ordered_twice_and_counts_at_its_target(table: Table) -> None:
    crowd = Crowd(table)
    crowd.told()
    for _ in range(5):
        table.after(600)
        crowd.a.report(tokens_per_s=crowd.a.stats.tokens_per_s + 1)
        crowd.b.report()
    assert len(crowd.a.told) == 1


def test_a_group_that_just_moved_stays_for_a_while(table: Table) -> None:
    crowd = Crowd(table)
    crowd.moved()
    crowd.a.report(running=0, waiting=0)
    crowd.b.report(running=2, waiting=1)
    table.after(600)
    crowd.b.report(tokens_per_s=1.0)
    assert crowd.b.told == []


def test_a_source_that_is_silent_and_comes_back_goes_on_with_its_group(table: Table) -> None:
    crowd = Crowd(table)
    left = crowd.told()
    table.silent("a")
    crowd.a.report()
    assert crowd.a.give_up(left) is Code.DENIED
    assert left.lease in crowd.a.held
    assert table.push(left, "a") is None


def test_a_source_that_dies_loses_the_group_and_it_begins_anew(table: Table) -> None:
    crowd = Crowd(table)
    left = crowd.told()
    table.ask("a", Detach(worker=WorkerId("a"), why="test"))
    assert table.operate(_yield(left), by="a")[0].code is Code.STALE_LEASE
    crowd.b.report()
    again = crowd.b.assign(left.group)
    assert (again.partial, again.lease > left.lease) == (0, True)


def test_a_target_that_dies_loses_the_group_and_it_begins_anew(table: Table) -> None:
    """The tokens of the first instance are not used a second time: the lease after the move started from zero."""
    crowd = Crowd(table)
    arrived = crowd.moved()
    table.ask("b", Detach(worker=WorkerId("b"), why="test"))
    crowd.a.report()
    again = crowd.a.assign(arrived.group)
    assert (again.partial, again.lease > arrived.lease) == (0, True)
    assert table.push(arrived, "b") is Code.STALE_LEASE


def test_an_assignment_that_was_lost_says_again_where_the_samples_are(table: Table) -> None:
    crowd = Crowd(table)
    arrived = crowd.moved()
    crowd.b.held.clear()
    crowd.b.report()
    assert crowd.b.held == {arrived.lease: arrived}


def test_a_scheduler_that_is_killed_forgets_orders_and_keeps_moves(table: Table) -> None:
    crowd = Crowd(table)
    left, arrived = crowd.newest, crowd.moved()
    table.restart()
    crowd.a.report()
    crowd.b.report()
    assert list(crowd.b.held) == [arrived.lease]
    assert crowd.a.give_up(left) is Code.STALE_LEASE
    assert table.push(arrived, "b") is None


def test_an_order_that_a_killed_scheduler_gave_moves_nothing(table: Table) -> None:
    crowd = Crowd(table)
    left = crowd.told()
    table.restart()
    crowd.a.report()
    assert crowd.a.give_up(left) is Code.DENIED
    assert table.push(left, "a") is None


def test_nothing_moves_once_the_run_drains(table: Table) -> None:
    crowd = Crowd(table)
    left = crowd.told()
    table.service.drain()
    assert crowd.a.give_up(left) is Code.DENIED


def test_a_rollback_leaves_nothing_of_an_abandoned_version_to_go_on_from(table: Table) -> None:
    """The group moved with tokens of version 1, which the rollback abandons, so its next holder starts from zero."""
    crowd = Crowd(table)
    left = crowd.told()
    (other,) = (assign for assign in crowd.a.held.values() if assign != left)
    crowd.a.finish(other.group)
    table.train()
    for seat in (crowd.a, crowd.b):
        seat.report()
    assert crowd.a.give_up(left, version=1) is None
    crowd.b.report()
    arrived = crowd.b.assign(left.group)
    assert arrived.partial == left.lease
    table.roll_back(to=0)
    assert table.push(arrived, "b", [(0, 3), (1, 3)]) is Code.STALE
    crowd.b.held.clear()
    crowd.b.report()
    assert crowd.b.assign(left.group) == msgspec.structs.replace(arrived, partial=LeaseId(0))


def _yield(assign: Assign) -> RegisterYield:
    return RegisterYield(group=assign.group, lease=assign.lease, lineage=assign.lineage, version=Version(0), sha="")
