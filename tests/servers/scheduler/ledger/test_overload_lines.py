"""When commits fail, the trace still records overload at every change, and no line is ahead of the store."""

import json
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from staleflow.servers.scheduler.ledger.interpreter import TABLES, Interpreter
from staleflow.servers.scheduler.main import open_service
from staleflow.servers.scheduler.service import ROOM_TICKS, Service
from staleflow.store.base import FULL_SHARE, StoreCorrupt, StoreError, StoreFull
from staleflow.store.memory import MemoryStore, MemoryWrite
from staleflow.trace.events import Overload
from staleflow.trace.writer import stored_head
from tests.servers.scheduler.table import Hands
from tests.servers.scheduler.world import config


class FailingStore(MemoryStore):
    """A store whose transactions fail at commit while ``failure`` is set."""

    failure: StoreError | None = None
    share = 0.0

    @contextmanager
    def write(self) -> Generator[MemoryWrite]:
        with super().write() as txn:
            yield txn
            if self.failure is not None:
                raise self.failure

    def used_share(self) -> float:
        return self.share


@pytest.fixture
def store() -> FailingStore:
    return FailingStore(TABLES)


@pytest.fixture
def opened(tmp_path: Path, store: FailingStore) -> tuple[Service, Interpreter]:
    return open_service(config(), tmp_path, store, Hands())


def look(service: Service, times: int = 1) -> None:
    """Let the service check the room of its store ``times`` times."""
    for _ in range(times * ROOM_TICKS):
        service.tick([])


def told(run_dir: Path) -> list[bool]:
    """Return the overload events of the trace."""
    lines: list[dict[str, Any]] = [json.loads(line) for line in (run_dir / "trace.jsonl").read_text().splitlines()]
    return [line["on"] for line in lines if line["ev"] == "overload"]


def test_overload_whose_line_was_lost_with_its_commit_is_told_again(
    tmp_path: Path, store: FailingStore, opened: tuple[Service, Interpreter]
) -> None:
    service, interpreter = opened
    store.share, store.failure = 0.95, StoreFull("no room")
    look(service, 3)
    assert (interpreter.failed, told(tmp_path)) == (True, [])
    store.failure = None
    look(service, 2)
    assert (interpreter.failed, told(tmp_path)) == (False, [True])
    store.share = 0.5
    look(service)
    assert told(tmp_path) == [True, False]


def test_overload_that_was_told_is_not_told_again_for_a_commit_that_fails(
    tmp_path: Path, store: FailingStore, opened: tuple[Service, Interpreter]
) -> None:
    service, interpreter = opened
    store.share = 0.95
    look(service)
    assert told(tmp_path) == [True]
    store.failure, store.share = StoreFull("no room"), 0.5
    interpreter.with_commit(lambda txn: None)
    look(service, 2)
    assert interpreter.failed
    store.failure = None
    look(service, 2)
    assert told(tmp_path) == [True, False]


@pytest.mark.parametrize("probing", [False, True])
def test_a_commit_that_finds_the_store_corrupt_leaves_nothing_for_the_trace_to_write(
    tmp_path: Path, store: FailingStore, opened: tuple[Service, Interpreter], probing: bool
) -> None:
    _, interpreter = opened
    before = (tmp_path / "trace.jsonl").read_bytes()
    interpreter.trace.add(Overload(on=True, resource="map", used=0.95, limit=FULL_SHARE))
    store.failure = StoreCorrupt("data.mdb is damaged")
    with pytest.raises(StoreCorrupt):
        interpreter.probe() if probing else interpreter.commit()
    interpreter.trace.close()
    with store.read() as txn:
        assert stored_head(txn).end == len(before)
    assert (tmp_path / "trace.jsonl").read_bytes() == before
