"""The phase of a run is durable once the answer that announces it is sent, and only a new session clears it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from staleflow.net.errors import RUN_IS_OVER, Refused
from staleflow.net.permissions import Role
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.consistency.ids import Step, TrainerTerm
from staleflow.protocols.wire.messages import (
    AttachReply,
    Commands,
    Done,
    Drain,
    Finished,
    GetBatch,
    NoMoreBatches,
    Refusal,
    RegisterOccupy,
)
from staleflow.servers.scheduler import service as services
from staleflow.trace.audit.report import audit
from staleflow.trace.reader import read_events
from tests.servers.scheduler.asked import Asked

DRAIN = Drain(why="night")


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Asked]:
    asked = Asked(tmp_path, steps=5)
    yield asked
    asked.stop()


def train(run: Asked, worker: str, step: int = 0) -> None:
    """Run one step, from its leases to its version."""
    for group, lease in run.leases(worker)[:2]:
        run.push(group, lease, worker)
        run.operate("shard.1", Role.SERVER, RegisterOccupy(group=group, lease=lease))
    batch = run.interpreter.machine.sealed_batch(Step(step))
    assert batch is not None
    run.publish(step + 1, batch.batch)


def finish(run: Asked, error: str = "") -> None:
    term = TrainerTerm(run.interpreter.machine.trainer_term)
    assert run.ask("trainer.1", Role.TRAINER, Finished(trainer_term=term, error=error)) == Done()


def restart(run: Asked, session: str = "") -> None:
    """Restart as after ``kill -9``: no file was closed."""
    run.stop()
    run.start(session)


def status(run: Asked) -> dict[str, Any]:
    values = run.service._status.status(set())  # pyright: ignore[reportPrivateUsage]
    return {key: getattr(values, key) for key in ("finished", "drained", "error", "closed")}


def closes(run: Asked) -> list[str]:
    return [event["why"] for event in read_events(run.run_dir / "trace.jsonl") if event["ev"] == "close"]


def test_an_acknowledged_end_survives_a_kill_and_the_trace_is_closed(run: Asked) -> None:
    run.cast("w")
    train(run, "w")
    finish(run)
    restart(run)
    assert status(run)["finished"] is True
    assert run.service.phase.draining
    refused = run.attach("w2.1", "w2", "rollout", Role.ROLLOUT, capacity=2)
    assert isinstance(refused, Refusal)
    assert Refused(refused.code, refused.detail).is_over
    leases = run.leases("w")
    answer = run.report("w", [lease for _, lease in leases])
    run.service.tick([])
    assert run.leases("w") == leases, "nothing new is leased"
    assert answer is None or (isinstance(answer, Commands) and answer.drain)
    run.service._finished_ms -= services.CLOSE_TIMEOUT_MS + 1  # pyright: ignore[reportPrivateUsage]
    run.service.tick([])
    assert closes(run) == ["finished"]
    assert audit(run.run_dir / "trace.jsonl").ok


def test_a_reason_to_give_up_survives_a_kill(run: Asked) -> None:
    run.cast("w")
    finish(run, "loss is nan")
    restart(run)
    assert (status(run)["finished"], status(run)["error"]) == (True, "loss is nan")


def test_a_drain_survives_a_kill(run: Asked) -> None:
    run.cast("w")
    assert run.ask("admin.1", Role.ADMIN, DRAIN) == Done()
    restart(run)
    assert (run.service.phase.draining, status(run)["drained"], status(run)["finished"]) == (True, "night", False)
    refused = run.attach("w2.1", "w2", "rollout", Role.ROLLOUT, capacity=2)
    assert isinstance(refused, Refusal)
    assert (refused.code, refused.detail) == (Code.DENIED, RUN_IS_OVER)


def test_a_run_that_had_closed_by_itself_is_over_after_a_restart(run: Asked) -> None:
    run.cast("w")
    train(run, "w")
    finish(run)
    run.service.close("finished")
    restart(run)
    run.service._finished_ms -= services.CLOSE_TIMEOUT_MS + 1  # pyright: ignore[reportPrivateUsage]
    run.service.tick([])
    assert status(run) == {"finished": True, "drained": "", "error": "", "closed": True}
    assert closes(run) == ["finished", "finished"]
    assert audit(run.run_dir / "trace.jsonl").ok


def test_only_a_new_session_clears_the_phase_and_clears_it_once(run: Asked) -> None:
    run.cast("w")
    run.ask("admin.1", Role.ADMIN, DRAIN)
    restart(run, "monday")
    assert (run.service.phase.draining, status(run)["drained"]) == (False, "")
    assert isinstance(run.attach("w2.1", "w2", "rollout", Role.ROLLOUT, capacity=2), AttachReply)
    run.ask("admin.1", Role.ADMIN, DRAIN)
    restart(run, "monday")  # a restart within its session: the scheduler was killed
    assert run.service.phase.draining
    restart(run)
    assert run.service.phase.draining


def test_a_scheduler_that_is_stopped_leaves_no_phase_behind(run: Asked) -> None:
    run.cast("w")
    run.service.drain()
    run.service.close("SIGTERM")
    restart(run)
    assert not run.service.phase.draining


# --- the end of a drain ----------------------------------------------------------------------------------------


def next_batch(run: Asked, step: int, id: int = 0) -> Any:
    term = TrainerTerm(run.interpreter.machine.trainer_term)
    body = GetBatch(trainer_term=term, step=Step(step), wait_ms=60_000)
    return run.ask("trainer.1", Role.TRAINER, body, id=id)


def test_the_trainer_learns_that_no_batch_comes_once_nothing_is_under_way(run: Asked) -> None:
    run.cast("w")
    held = run.leases("w")
    assert next_batch(run, 0) is None
    call = run.waiting()
    run.ask("admin.1", Role.ADMIN, DRAIN)
    run.service.tick([])
    assert call() is None, "two groups are under way, which make a batch"
    for group, lease in held:
        run.push(group, lease, "w")
    run.service.tick([])
    assert call() is None, "they are still in a stage"
    for group, lease in held:
        run.operate("shard.1", Role.SERVER, RegisterOccupy(group=group, lease=lease))
    run.service.flush()
    batch = call()
    assert batch is not None
    assert type(batch).__name__ == "Batch", "what was under way is trained"
    assert next_batch(run, 1) is None
    call = run.waiting()
    run.service.tick([])
    no_more = call()
    assert isinstance(no_more, NoMoreBatches)
    assert "night" in no_more.why
    assert not status(run)["finished"], "the trainer reports the end, after its checkpoint"


def test_groups_that_never_end_hold_a_drain_up_for_a_while_only(run: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    run.cast("w")
    assert next_batch(run, 0) is None
    call = run.waiting()
    monkeypatch.setattr(services, "DRAIN_TIMEOUT_MS", 0)
    run.ask("admin.1", Role.ADMIN, DRAIN)
    run.service.tick([])
    answer = run.report("w", [lease for _, lease in run.leases("w")])
    assert isinstance(answer, Commands)
    assert answer.drain, "its worker is asked to leave"
    monkeypatch.setattr(services, "SETTLE_TIMEOUT_MS", 0)
    run.service.tick([])
    assert isinstance(call(), NoMoreBatches)


def test_a_drain_without_a_trainer_ends_by_itself(run: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "TRAINER_TIMEOUT_MS", 0)
    run.ask("admin.1", Role.ADMIN, DRAIN)
    run.service.tick([])
    run.service.tick([])
    assert status(run) == {"finished": True, "drained": "night", "error": "", "closed": True}
    assert closes(run) == ["drained"]
