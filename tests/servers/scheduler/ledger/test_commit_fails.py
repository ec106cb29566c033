"""A failed commit has no effect, and messages that must come first are sent first once the store has room again."""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from staleflow.servers.scheduler.ledger.interpreter import TABLES
from staleflow.servers.scheduler.main import open_service
from staleflow.servers.scheduler.service import ROOM_TICKS
from staleflow.store.base import StoreFull
from staleflow.store.memory import MemoryStore, MemoryWrite
from staleflow.trace.audit.report import audit
from staleflow.trace.writer import stored_head
from tests.servers.scheduler.table import Hands
from tests.servers.scheduler.world import config


class SmallStore(MemoryStore):
    """A store that has no room while ``full``."""

    full = False

    @contextmanager
    def write(self) -> Generator[MemoryWrite]:
        with super().write() as txn:
            yield txn
            if self.full:
                raise StoreFull("no room")


def test_a_scheduler_that_starts_on_a_full_disk_opens_its_trace_once_there_is_room(tmp_path: Path) -> None:
    store = SmallStore(TABLES)
    store.full = True
    service, interpreter = open_service(config(), tmp_path, store, Hands())
    for _ in range(3 * ROOM_TICKS):
        service.tick([])
    assert (interpreter.failed, (tmp_path / "trace.jsonl").read_bytes()) == (True, b"")
    store.full = False
    for _ in range(2 * ROOM_TICKS):
        service.tick([])
    assert not interpreter.failed
    service.close("test")
    interpreter.trace.close()
    again, second = open_service(config(), tmp_path, store, Hands())
    again.close("test")
    second.trace.close()
    report = audit(tmp_path / "trace.jsonl")
    assert (report.violations, report.events["open"]) == ([], 2)


def test_a_probe_that_fails_leaves_nothing_for_the_trace_to_write(tmp_path: Path) -> None:
    store = SmallStore(TABLES)
    service, interpreter = open_service(config(), tmp_path, store, Hands())
    before = (tmp_path / "trace.jsonl").read_bytes()
    store.full = True
    service.drain()
    service.close("test")
    assert interpreter.failed
    interpreter.probe()
    interpreter.trace.close()
    with store.read() as txn:
        assert stored_head(txn).end == len(before)
    assert (tmp_path / "trace.jsonl").read_bytes() == before
