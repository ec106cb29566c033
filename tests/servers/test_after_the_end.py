"""Workers that arrive after the end of a run find no work left and get no error."""

import asyncio
import sys
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from staleflow.clients.attachment import attach
from staleflow.configs.errors import ConfigError
from staleflow.net.client import Client
from staleflow.net.errors import RUN_IS_OVER, Refused, RunOver
from staleflow.net.permissions import Role
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.consistency.ids import WorkerId
from staleflow.protocols.wire.messages import Attach, AttachReply, Done, Finished, Refusal
from staleflow.servers.scheduler import service
from staleflow.supervisor.joining import has_ended, join_run
from tests.servers.running import Run, eventually
from tests.servers.scheduler.asked import Asked

HELLO = Attach(worker=WorkerId("w.1"), name="w", role="rollout")


async def finish(run: Run) -> None:
    trainer = await run.trainer()
    await trainer.scheduler.ask(Finished(trainer_term=trainer.joined.trainer_term), Done)


async def closed(run: Run) -> None:
    """Return the scheduler of a finished run, once it has written the end of its trace."""
    await finish(run)

    async def is_closed() -> bool:
        return bool((await run.status(run.where.scheduler))["closed"])

    await eventually(is_closed)


@pytest.mark.parametrize(
    "words", [("rollout", "--run-dir"), ("rollout", "--connect"), ("relay", "--run-dir"), ("train", "--connect")]
)
async def test_a_worker_that_comes_too_late_says_so_and_ends_with_0(run: Run, words: tuple[str, str]) -> None:
    await closed(run)
    role, how = words
    where = run.where.scheduler if how == "--connect" else run.run_dir
    late = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "staleflow.cli", "attach", role, how, str(where), "--name", "late"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    said, _ = await asyncio.wait_for(late.communicate(), 60.0)
    told = [line for line in said.decode().splitlines() if RUN_IS_OVER in line]
    assert (late.returncode, len(told)) == (0, 1), said.decode()


async def test_only_the_end_of_the_run_is_no_mistake(run: Run) -> None:
    class Says:
        address = "ipc:///none"

        def __init__(self, detail: str) -> None:
            self.detail = detail

        async def ask(self, *_: object, **__: object) -> object:
            raise Refused(Code.DENIED, self.detail)

    with pytest.raises(RunOver):
        await attach(cast(Client, Says(RUN_IS_OVER)), HELLO)
    with pytest.raises(ConfigError, match="your key is another's"):
        await attach(cast(Client, Says("your key is another's")), HELLO)


async def test_a_machine_is_told_of_the_end_before_the_trace_is_closed(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "CLOSE_TIMEOUT_MS", 600_000)

    def look() -> bool:
        return has_ended(run.where.scheduler, "train", timeout_s=20.0)

    assert await asyncio.to_thread(look) is False
    trainer = await run.trainer()
    await trainer.publish(0, {"w": np.zeros(4, np.float32)})
    rollout = await run.rollout()
    await rollout.leases(1)  # keeps the trace open
    await trainer.scheduler.ask(Finished(trainer_term=trainer.joined.trainer_term), Done)
    assert await asyncio.to_thread(look) is True
    assert not (await run.status(run.where.scheduler))["closed"]


async def test_joining_a_run_that_is_over_is_told_apart(run: Run) -> None:
    assert (await asyncio.to_thread(join_run, run.where.scheduler, "rollout"))[0] == run.config
    await closed(run)
    with pytest.raises(RunOver):
        await asyncio.to_thread(join_run, run.where.scheduler, "rollout")
    assert await asyncio.to_thread(has_ended, run.where.scheduler, "rollout", timeout_s=20.0)


@pytest.mark.parametrize("finished", [False, True])
def test_a_scheduler_that_ends_alone_has_those_who_come_wait_for_the_next(tmp_path: Path, finished: bool) -> None:
    run = Asked(tmp_path)
    try:
        assert isinstance(run.attach("w.1", "w", "rollout", Role.ROLLOUT), AttachReply)
        run.service.phase.finished = finished
        run.service.close("SIGTERM")
        answer = run.attach("w.2", "w", "rollout", Role.ROLLOUT)
        assert isinstance(answer, Refusal)
        assert answer.code is (Code.DENIED if finished else Code.BUSY)
        assert Refused(answer.code, answer.detail).is_over == finished
    finally:
        run.stop()
