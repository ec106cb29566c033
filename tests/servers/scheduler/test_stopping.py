"""A scheduler that is stopped first tells every rollout worker that no more work follows."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from staleflow.process.daemon import Stop
from staleflow.protocols.wire.messages import Commands, Detach, Done, InstanceStats, Report
from staleflow.servers.scheduler import main
from tests.servers.running import Rollout, Run


async def report(rollout: Rollout, wait_ms: int = 10) -> Commands:
    body = Report(worker=rollout.worker, ack=rollout.ack, held=[], stats=InstanceStats(), wait_ms=wait_ms)
    return await rollout.scheduler.ask(body, Commands, timeout_s=20)


class Stopping(Run):
    """A run whose scheduler is the shipped one."""

    async def _schedule(self, stop: Stop) -> None:
        store = main.open_store(self.config, self.run_dir)
        try:
            await main.serve_until(stop, self.config, self.run_dir, store)
        finally:
            store.close()

    def stop_scheduler(self) -> "asyncio.Task[None]":
        stop, task = self._stops.pop("scheduler")
        stop.set("test")
        return task


@asynccontextmanager
async def stopping(run_dir: Path) -> AsyncGenerator[Stopping]:
    run = Stopping(run_dir)
    try:
        run.scheduler()
        run.trajectories()
        yield run
    finally:
        await run.close()


async def test_a_worker_that_reports_after_the_stop_is_told_to_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main, "DRAIN_NOTICE_S", 60.0)
    async with stopping(tmp_path) as run:
        told, silent, left = [await run.rollout(f"rollout-{number}") for number in range(3)]
        for rollout in (told, silent, left):
            assert not (await report(rollout)).drain
        await left.scheduler.ask(Detach(worker=left.worker, why="it has enough"), Done)
        task = run.stop_scheduler()
        assert (await report(told, wait_ms=10_000)).drain
        done, _ = await asyncio.wait({task}, timeout=0.3)
        assert not done, "one worker does not know yet"
        assert (await report(silent)).drain
        await asyncio.wait_for(task, 20)


async def test_a_worker_that_does_not_report_delays_the_stop_for_a_moment_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main, "DRAIN_NOTICE_S", 0.2)
    async with stopping(tmp_path) as run:
        await run.rollout()
        await asyncio.wait_for(run.stop_scheduler(), 20)
