"""The attach data of processes takes bounded room in store and memory, however often and long they attach."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from staleflow.net.permissions import Role
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.consistency.ids import WorkerId
from staleflow.protocols.wire.messages import AttachReply, Detach, Done, GetStatus, Refusal, Status
from staleflow.protocols.wire.messages.status import as_dict
from staleflow.servers.scheduler.status import status
from staleflow.servers.scheduler.workers import registry
from tests.servers.scheduler.asked import Asked
from tests.servers.scheduler.table import Seat, Table
from tests.servers.scheduler.world import config


def test_long_texts_are_refused(tmp_path: Path) -> None:
    run = Asked(tmp_path)
    run.cast()
    for field in ("endpoint", "stage", "prompts_sha"):
        answer = run.attach("m", "m", "monitor", Role.MONITOR, **{field: "x" * 100_000})
        assert isinstance(answer, Refusal)
        assert answer.code is Code.MALFORMED
    assert isinstance(run.attach("m", "m", "monitor", Role.MONITOR), AttachReply)
    assert isinstance(run.ask("m", Role.MONITOR, Detach(worker=WorkerId("m"), why="x" * 10**6)), Done)
    assert run.interpreter.trace.path.stat().st_size < 10_000
    run.stop()


def test_a_process_has_one_name(tmp_path: Path) -> None:
    run = Asked(tmp_path)
    run.cast()
    assert isinstance(run.attach("m", "m0", "monitor", Role.MONITOR), AttachReply)
    answer = run.attach("m", "m1", "monitor", Role.MONITOR)
    assert isinstance(answer, Refusal)
    assert answer.code is Code.CONFLICT
    run.stop()


def test_who_only_looked_is_forgotten(tmp_path: Path) -> None:
    run = Asked(tmp_path)
    run.cast()
    for number in range(100):
        assert isinstance(run.attach(f"m{number}", f"m{number}", "monitor", Role.MONITOR), AttachReply)
        run.service.on_gone(f"m{number}")
    with run.interpreter.store.read() as txn:
        assert txn.count("workers") == 3
    status = run.service._registry.processes()  # pyright: ignore[reportPrivateUsage]
    assert len(status) == 3
    run.stop()


def stored(run: Asked) -> set[str]:
    with run.interpreter.store.read() as txn:
        return {key.decode() for key in txn.keys("workers")}


def came_and_went(run: Asked, name: str, key: str) -> None:
    assert isinstance(run.attach(f"{name}.1", name, "rollout", Role.ROLLOUT, key=key, capacity=1), AttachReply)
    run.service.on_gone(f"{name}.1")
    run.service.flush()


def test_workers_that_fell_silent_first_are_forgotten_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An autoscaler gives each pod its own name: names alone must fill neither the store nor memory."""
    monkeypatch.setattr(registry, "MAX_SILENT_PER_KEY", 3)
    monkeypatch.setattr(registry, "MAX_SILENT", 5)
    run = Asked(tmp_path)
    run.cast("a")
    here = {"trajectories-0", "parameters", "trainer", "name-of-a"}
    for number in range(20):
        came_and_went(run, f"pod-{number}", "box")
    assert stored(run) == here | {"pod-17", "pod-18", "pod-19"}, "of one key"
    for number in range(2):
        came_and_went(run, f"tub-{number}", "tub")
    assert stored(run) == here | {"pod-17", "pod-18", "pod-19", "tub-0", "tub-1"}
    came_and_went(run, "can-0", "can")
    assert len(stored(run)) == len(here) + 5, "of all keys"
    assert {process.name for process in run.service._registry.processes()} == stored(run)  # pyright: ignore[reportPrivateUsage]
    run.stop()


def test_a_silent_worker_is_kept_while_it_has_a_lease_and_so_are_servers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "MAX_SILENT_PER_KEY", 0)
    run = Asked(tmp_path)
    run.cast("a")
    for worker in ("a", "shard.1", "parameters.1", "trainer.1"):
        run.service.on_gone(worker)
    run.service.flush()
    assert stored(run) == {"trajectories-0", "parameters", "trainer", "name-of-a"}
    held = run.leases("a")
    run.report("a")  # reports again, under its lease
    assert held
    assert run.leases("a") == held
    run.stop()


def test_a_worker_that_is_silent_for_long_is_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "SILENT_TIMEOUT_MS", 60_000)
    table = Table(tmp_path / "run", config(lease_s=1.0))
    Seat(table, "a", capacity=1)
    table.silent("a")

    def known() -> bool:
        with table.store.read() as txn:
            return b"a" in txn.keys("workers")

    table.after(59_000)
    assert known()
    table.after(2_000)
    assert not known()
    table.attach("a", "rollout", capacity=1)
    assert known()
    table.close()


def test_after_a_restart_every_worker_has_time_to_be_heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler that has just started has no reports and no keys of workers: it must not forget a worker for that."""
    monkeypatch.setattr(registry, "MAX_SILENT_PER_KEY", 1)
    monkeypatch.setattr(registry, "RECONNECT_TIMEOUT_MS", 10_000)
    table = Table(tmp_path / "run", config())
    for number in range(4):
        table.attach(f"w{number}", "rollout", capacity=0)
    table.restart()
    table.after(9_000)
    names = [process.name for process in table.service._registry.processes()]  # pyright: ignore[reportPrivateUsage]
    assert {"w0", "w1", "w2", "w3"} <= set(names)
    table.attach("w0", "rollout", capacity=0)
    table.after(2_000)
    names = [process.name for process in table.service._registry.processes()]  # pyright: ignore[reportPrivateUsage]
    assert "w0" in names
    assert len([name for name in names if name in ("w1", "w2", "w3")]) <= 1
    table.close()


def test_a_key_has_a_limited_number_of_live_workers(tmp_path: Path) -> None:
    run = Asked(tmp_path)
    scheduler = msgspec.structs.replace(run.config.scheduler, max_workers_per_key=2)
    run.stop()
    run.config = msgspec.structs.replace(run.config, scheduler=scheduler)
    (tmp_path / "other").mkdir()
    run.run_dir = tmp_path / "other"
    run.start()
    run.cast()

    def attach(name: str, key: str) -> object:
        return run.attach(f"{name}.1", name, "rollout", Role.ROLLOUT, key=key, capacity=1)

    assert isinstance(attach("a", "box"), AttachReply)
    assert isinstance(attach("b", "box"), AttachReply)
    no = attach("c", "box")
    assert isinstance(no, Refusal)
    assert no.code is Code.BUSY
    assert no.detail == "its key has 2 live processes already (scheduler.max_workers_per_key)"
    assert isinstance(attach("b", "box"), AttachReply), "the same process again"
    assert isinstance(attach("d", "tub"), AttachReply), "another key"
    run.service.on_gone("a.1")
    assert isinstance(attach("c", "box"), AttachReply)
    run.stop()


def test_a_status_lists_live_workers_first_and_few_of_the_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status, "MAX_SILENT_ROWS", 2)
    table = Table(tmp_path / "run", config())
    for number in range(5):
        table.attach(f"w{number}", "rollout", capacity=0)
        table.after(100)
        table.silent(f"w{number}")
    table.attach("x", "rollout", capacity=0)
    values = asked(table)
    here = ["trajectories-0", "parameters", "trainer", "x"]
    assert [worker["name"] for worker in values["workers"]] == [*here, "w4", "w3"]
    assert values["workers_left_out"] == 3
    table.close()


def asked(table: Table) -> dict[str, Any]:
    reply = table.ask("monitor", GetStatus())
    assert isinstance(reply, Status)
    return as_dict(reply)
