"""An attached server stops even while calls arrive, and takes over the name of its predecessor in the same slot."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from staleflow.clients.attachment import attach
from staleflow.configs.errors import ConfigError
from staleflow.net.endpoint import Call
from staleflow.net.errors import Unavailable
from staleflow.process import readiness
from staleflow.process.daemon import Stop
from staleflow.protocols.consistency.ids import WorkerId
from staleflow.protocols.wire.messages import Attach, GetStatus
from staleflow.servers import runner as attached
from staleflow.servers.runner import Service, Tasks, serve_attached
from staleflow.servers.scheduler.workers import attachments
from tests.servers.running import GIVE_UP_S, Run

SERVER = WorkerId("parameters.1")


class Slow(Service):
    """A service without replies: it works on the first call until the second arrives, and on the second without end."""

    def __init__(self, tasks: Tasks) -> None:
        super().__init__(tasks, retry_ms=1)
        self.draining = asyncio.Event()
        self.calls = 0
        self._second = asyncio.Event()

    def handle(self, call: Call) -> None:
        self.calls += 1
        self._tasks.start(asyncio.Event().wait() if self.calls > 1 else self._second.wait())
        if self.calls > 1:
            self._second.set()

    async def work(self) -> None:
        await asyncio.Event().wait()

    def drain(self) -> None:
        self.draining.set()


async def test_a_call_that_comes_while_a_server_stops_does_not_keep_it(
    make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attached, "SHUTDOWN_TIMEOUT_S", 60.0)
    run, stop, made = make_run(), Stop(), list[Slow]()
    run.scheduler()

    def make(tasks: Tasks) -> Slow:
        made.append(Slow(tasks))
        return made[0]

    serving = asyncio.create_task(
        serve_attached(
            stop,
            bind=run.where.parameters,
            scheduler=run.client(run.where.scheduler, SERVER),
            hello=lambda address: Attach(worker=SERVER, name="parameters", role="parameters", endpoint=address),
            make=make,
        )
    )
    asking = run.client(run.where.parameters, WorkerId("reader.1"))

    async def ask() -> None:
        with suppress(Unavailable):
            await asking.call(GetStatus(), timeout_s=None)

    async with asyncio.timeout(GIVE_UP_S):
        questions = [asyncio.create_task(ask())]
        while not (made and made[0].calls):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        stop.set("SIGTERM")
        await made[0].draining.wait()
        questions.append(asyncio.create_task(ask()))
        await serving
    for question in questions:
        question.cancel()


async def test_a_process_tells_its_supervisor_when_the_run_has_taken_it(
    make_run: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, server, worker = make_run(), tmp_path / "server", tmp_path / "worker"
    run.scheduler()
    monkeypatch.setenv(readiness.VARIABLE, str(server))
    run.trajectories()
    assert readiness.attached_at(server) is None
    async with asyncio.timeout(GIVE_UP_S):
        while readiness.attached_at(server) is None:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        monkeypatch.setenv(readiness.VARIABLE, str(worker))
        hello = Attach(worker=WorkerId("w.1"), name="w", role="rollout")
        await attach(run.client(run.where.scheduler, hello.worker), hello)
    assert readiness.attached_at(worker) is not None


async def test_a_process_has_the_name_of_its_predecessor_in_the_same_slot_at_once(
    make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The predecessor still sends heartbeats."""
    run = make_run()
    run.scheduler()
    run.trajectories()
    monkeypatch.setenv(readiness.SLOT_VARIABLE, "secret")
    for worker in (WorkerId("w.1"), WorkerId("w.2")):
        await attach(run.client(run.where.scheduler, worker), Attach(worker=worker, name="w", role="rollout"))
    monkeypatch.setattr(attachments, "NAME_TIMEOUT_MS", 300)
    monkeypatch.setenv(readiness.SLOT_VARIABLE, "another")
    other = WorkerId("w.3")
    with pytest.raises(ConfigError, match=r"rollout worker is .*the live process w\.2 has this name; end it, or use"):
        await attach(run.client(run.where.scheduler, other), Attach(worker=other, name="w", role="rollout"))
