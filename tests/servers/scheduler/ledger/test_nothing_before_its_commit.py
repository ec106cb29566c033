"""No peer learns of uncommitted state, and a request whose commit failed takes effect when it is repeated."""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.consistency.ids import WorkerId
from staleflow.protocols.wire.messages import Commands, Detach, Done, Refusal, Reply, Report
from staleflow.servers.scheduler.service import ROOM_TICKS
from staleflow.store.base import StoreFull
from staleflow.store.memory import MemoryStore, MemoryWrite
from tests.servers.scheduler.table import TICK_MS, Seat, Table
from tests.servers.scheduler.world import config


@contextmanager
def full(monkeypatch: pytest.MonkeyPatch) -> Generator[None]:
    """Make every commit fail."""
    write = MemoryStore.write

    @contextmanager
    def fails(self: MemoryStore) -> Generator[MemoryWrite]:
        with write(self) as txn:
            yield txn
            raise StoreFull("no room")

    with monkeypatch.context() as patched:
        patched.setattr(MemoryStore, "write", fails)
        yield


def test_an_instance_that_waits_is_told_of_the_end_after_the_commit(tmp_path: Path) -> None:
    table = Table(tmp_path / "run", config())
    seat = Seat(table, "a")
    told: list[Reply] = []
    report = Report(worker=WorkerId("a"), ack=seat.ack, held=list(seat.held), stats=seat.stats, wait_ms=60_000)
    table.call("a", report, told.append)
    assert told == []
    table.service.drain()
    table.deliver()
    assert told == [], "orders of this drain may lie with it"
    table.flush()
    assert [(type(reply), reply.drain) for reply in told if isinstance(reply, Commands)] == [(Commands, True)]
    table.call("a", report, told.append)
    assert len(told) == 1, "it is told once; who reports after every answer would never stop"
    Seat(table, "b").report()  # attaches after the drain, and learns of it
    table.close()


def test_a_goodbye_whose_commit_failed_frees_the_leases_when_it_is_said_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = Table(tmp_path / "run", config())
    seat = Seat(table, "a")
    assert seat.held
    goodbye = Detach(worker=WorkerId("a"), why="")
    with full(monkeypatch):
        refused = table.ask("a", goodbye)
        assert isinstance(refused, Refusal)
        assert refused.code is Code.BUSY
    assert table.interpreter.machine.state_counts()["leased"] == len(seat.held)
    table.after(2 * ROOM_TICKS * TICK_MS)
    assert isinstance(table.ask("a", goodbye), Done)
    assert table.interpreter.machine.state_counts()["leased"] == 0
    table.close()
