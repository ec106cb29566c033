"""A report of loaded weights enters the trace only if it can be true, as no other line is dictated by a worker."""

import json
from pathlib import Path

import pytest

from staleflow.net.permissions import Role
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.consistency.ids import Lineage, Version, WorkerId
from staleflow.protocols.wire.messages import (
    Detach,
    Done,
    GetRetainedVersions,
    Pulled,
    Refusal,
    Reply,
    RetainedVersions,
)
from staleflow.servers.scheduler import service
from staleflow.servers.scheduler.ledger import rejects
from staleflow.servers.scheduler.workers import pull_reports as pulls
from staleflow.store.base import key_number
from staleflow.trace.audit.report import audit
from tests.servers.scheduler.asked import Asked
from tests.servers.scheduler.table import Seat, Table
from tests.servers.scheduler.world import config, sha


def pulled(
    run: Asked, worker: str, *, version: int = 0, lineage: int = 0, digest: str | None = None, ok: bool = True
) -> Reply | None:
    body = Pulled(
        worker=WorkerId(worker),
        lineage=Lineage(lineage),
        version=Version(version),
        sha=sha(version) if digest is None else digest,
        ok=ok,
    )
    return run.ask(worker, Role.ROLLOUT, body, key=f"key-of-{worker}")


def code(answer: object) -> Code | None:
    return answer.code if isinstance(answer, Refusal) else None


def lines(run: Asked, event: str) -> list[dict[str, object]]:
    every = [json.loads(line) for line in run.interpreter.trace.path.read_text().splitlines()]
    return [line for line in every if line["ev"] == event]


def told(run: Asked) -> list[tuple[object, ...]]:
    return [(line["worker"], line["version"], line["ok"]) for line in lines(run, "pull")]


def test_only_an_attached_worker_reports_what_it_has_loaded(tmp_path: Path) -> None:
    run = Asked(tmp_path)
    run.cast("a")
    assert pulled(run, "a") == Done()
    assert code(pulled(run, "nobody")) is Code.DENIED
    run.ask("a", Role.ROLLOUT, Detach(worker=WorkerId("a"), why="test"), key="key-of-a")
    assert code(pulled(run, "a")) is Code.FENCED
    assert told(run) == [("a", 0, True)]
    assert {(line["op"], line["worker"], line["code"]) for line in lines(run, "reject")} == {
        ("pull", "nobody", "denied"),
        ("pull", "a", "fenced"),
    }
    run.stop()


def test_only_a_surviving_published_version_with_its_digest_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rejects, "LINE_INTERVAL_MS", 3_600_000)  # longer than a slow machine takes
    run = Asked(tmp_path)
    run.cast("a")
    for version, lineage in ((1, 0), (10**18, 7), (2**64 - 1, -5), (-1, 0), (0, 1)):
        for ok in (True, False):
            assert code(pulled(run, "a", version=version, lineage=lineage, ok=ok)) is Code.BAD_VERSION
    for digest, ok in (("", True), ("f" * 64, True), ("f" * 64, False)):
        assert code(pulled(run, "a", digest=digest, ok=ok)) is Code.CONFLICT
    assert told(run) == []
    assert len(lines(run, "reject")) == 2  # one per code and interval
    assert pulled(run, "a") == Done()
    assert told(run) == [("a", 0, True)]
    run.service.close("test")
    assert audit(run.interpreter.trace.path).violations == []
    run.stop()


def test_a_restarted_scheduler_knows_the_digests(tmp_path: Path) -> None:
    run = Asked(tmp_path)
    run.cast("a")
    run.stop()
    run.start()
    assert code(pulled(run, "a", digest="f" * 64)) is Code.CONFLICT
    assert pulled(run, "a") == Done()
    assert told(run) == [("a", 0, True)]
    run.stop()


def test_a_report_that_is_repeated_without_end_does_not_fill_the_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rejects, "LINE_INTERVAL_MS", 3_600_000)  # longer than a slow machine takes
    run = Asked(tmp_path)
    run.cast("a", "b")
    for _ in range(1_000):
        assert pulled(run, "a", digest="", ok=False) == Done()
        assert pulled(run, "b") == Done()
    found = told(run)
    assert ("a", 0, False) in found
    assert ("b", 0, True) in found
    assert len(found) < 100
    run.stop()


def test_a_key_keeps_few_versions_by_its_workers_reports_of_what_they_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "MAX_LOADED_PER_KEY", 2)
    table = Table(tmp_path / "run", config(batch_size=1, max_staleness=1))
    seat = Seat(table, "a")
    for _ in range(6):
        seat.finish(seat.holds()[0])
        table.train()
        seat.report()
    for version in range(1, 6):
        liar = Seat(table, f"liar-{version}", capacity=0)
        liar.loads = False
        liar.report(lineage=Lineage(0), version=Version(version))
    kept = table.ask("parameters", GetRetainedVersions())
    assert isinstance(kept, RetainedVersions)
    needed = table.interpreter.machine.versions_in_use()
    assert kept.versions == sorted({*needed, (0, 6), (0, 5)})
    assert (0, 2) not in kept.versions
    table.close()


def test_a_digest_is_forgotten_when_no_worker_can_load_its_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pulls, "LATE_VERSIONS", 0)
    table = Table(tmp_path / "run", config(batch_size=1, max_staleness=1))
    seat = Seat(table, "a")
    for _ in range(5):
        seat.finish(seat.holds()[0])
        table.train()
        seat.report()
    with table.store.read() as txn:
        kept = [key for key, _ in txn.items("meta", b"sha/") if key.startswith(b"sha/")]
    assert [key_number(key.removeprefix(b"sha/")) for key in kept] == [0, 4, 5]  # 0: the version of the checkpoint
    table.close()
