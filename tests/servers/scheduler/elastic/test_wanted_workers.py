"""A worker that is not wanted finishes its groups and is then asked to leave; the wanted names survive a restart."""

from pathlib import Path

import msgspec
from msgspec.structs import replace

from staleflow.configs.elastic import Elastic
from staleflow.configs.schema import Config
from staleflow.protocols.consistency.ids import WorkerId
from staleflow.protocols.wire.messages import Commands, Reply, Report
from tests.servers.scheduler.table import Seat, Table
from tests.servers.scheduler.world import config


def elastic(most: int) -> Config:
    """A run that starts with one rollout worker."""
    base = config()
    return replace(base, rollout=replace(base.rollout, elastic=Elastic(max_workers=most)))


def drains(table: Table, seat: Seat) -> bool:
    """Return whether the reply to a report asks the worker to leave."""
    replies: list[Reply] = []
    report = Report(worker=WorkerId(seat.name), ack=seat.ack, held=list(seat.held), stats=seat.stats, wait_ms=1)
    table.call(seat.name, report, replies.append)
    table.after(50)
    (reply,) = replies
    assert isinstance(reply, Commands)
    return reply.drain


def test_a_worker_that_is_not_wanted_finishes_its_groups_and_leaves(tmp_path: Path) -> None:
    table = Table(tmp_path / "run", elastic(2))
    second = Seat(table, "rollout-1", capacity=2)
    assert len(second.holds()) == 2
    table.after(50)
    assert table.status()["wanted"] == ["rollout-0"]
    assert not drains(table, second)
    for group in second.holds():
        second.finish(group)
    second.report()
    assert second.holds() == [], "it gets no further group"
    assert drains(table, second)
    first = Seat(table, "rollout-0", capacity=2)
    assert len(first.holds()) == 2
    guest = Seat(table, "guest", capacity=1)
    table.after(50)
    assert not drains(table, first)
    assert not drains(table, guest), "a worker that was attached by hand is left alone"


def test_without_limits_every_worker_is_wanted(tmp_path: Path) -> None:
    table = Table(tmp_path / "run", elastic(0))
    seat = Seat(table, "rollout-7", capacity=1)
    table.after(50)
    assert table.status()["wanted"] == []
    seat.finish(seat.holds()[0])
    assert not drains(table, seat)


def test_the_wanted_names_survive_a_restart_of_the_scheduler_and_end_with_the_session(tmp_path: Path) -> None:
    table = Table(tmp_path / "run", elastic(3))
    stored = msgspec.msgpack.encode(("rollout-0", "rollout-2", "rollout-9"))
    table.interpreter.with_commit(lambda txn: txn.put("meta", b"wanted", stored))
    table.flush()
    table.restart()
    assert table.status()["wanted"] == ["rollout-0", "rollout-2"], "names beyond the limit are not wanted"
    table.restart("resumed")
    assert table.status()["wanted"] == ["rollout-0"]
