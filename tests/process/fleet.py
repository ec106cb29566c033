"""The servers of a run as real processes. The test takes the supervisor's place and kills, stops and restarts them."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from staleflow.clients.admin import Admin
from staleflow.net.client import Client, worker_id
from staleflow.net.errors import Refused, Unavailable
from staleflow.protocols.wire.messages import GetStatus, Status
from staleflow.protocols.wire.messages.status import as_dict
from staleflow.supervisor.lifeline import VARIABLE, Lifeline
from tests.servers.running import config_of

SHARDS = 2
START_S = 120.0
"""Time limit for a server to reply after its start, on a machine with other load."""
GRACE_S = 120.0
"""Time limit for a process to exit after SIGTERM."""
_CLI = (sys.executable, "-m", "staleflow.cli")


class Fleet:
    """Processes of one run by name: scheduler, trajectories-0, ..., parameters, and actors."""

    def __init__(self, run_dir: Path, **sections: dict[str, Any]) -> None:
        from staleflow.configs.loading.load import addresses

        self.run_dir = run_dir
        self.config = config_of(run_dir, **_steady(sections))
        (run_dir / "logs").mkdir(exist_ok=True)
        where = addresses(self.config, run_dir)
        self.shards = [f"trajectories-{shard}" for shard in range(len(where.trajectories))]
        self.servers = ["scheduler", *self.shards, "parameters"]
        self.where = dict(zip(self.servers, where.all, strict=True))
        self._lifeline = Lifeline()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    async def __aenter__(self) -> "Fleet":
        for name in self.servers:
            self.start(name)
        for name in self.servers:
            await self.answers(name)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name, process in list(self._processes.items()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGCONT)
            process.kill()
            process.wait()
            del self._processes[name]
        self._lifeline.close()

    @property
    def journals(self) -> Path:
        return self.run_dir / "journals"

    @property
    def stores(self) -> list[Path]:
        return [self.run_dir / name for name in self.shards]

    def start(self, name: str) -> None:
        """Start a server."""
        role, _, shard = name.partition("-")
        words = ("serve", role, "--run-dir", str(self.run_dir), *(("--shard", shard) if shard else ()))
        self._spawn(name, (*_CLI, *words))

    def act(self, role: str, name: str, **options: object) -> None:
        """Start an actor as a separate process."""
        given = [f"{key}={value}" for key, value in options.items()]
        self._spawn(name, (sys.executable, "-m", "tests.process.actors", role, str(self.run_dir), name, *given))

    def _spawn(self, name: str, command: tuple[str, ...]) -> None:
        assert name not in self._processes, f"{name} runs already"
        with (self.run_dir / "logs" / f"{name}.out").open("ab") as output:
            self._processes[name] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, "OMP_NUM_THREADS": "1", VARIABLE: str(self._lifeline.read_fd)},
                pass_fds=(self._lifeline.read_fd,),
                start_new_session=True,
            )

    def signal(self, name: str, number: signal.Signals) -> None:
        self._processes[name].send_signal(number)

    def kill(self, name: str) -> None:
        """Send ``kill -9``; the process has exited when this returns."""
        self.signal(name, signal.SIGKILL)
        self._processes.pop(name).wait()

    async def end(self, name: str) -> tuple[int, float]:
        """Send SIGTERM; return the exit code and the seconds until the exit."""
        started = time.monotonic()
        self.signal(name, signal.SIGTERM)
        code = await self.ended(name, GRACE_S)
        return code, time.monotonic() - started

    async def ended(self, name: str, within_s: float) -> int:
        """Return the exit code of a process that exits without a signal."""
        process = self._processes[name]
        async with asyncio.timeout(within_s):
            while process.poll() is None:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        return self._processes.pop(name).wait()

    async def answers(self, name: str) -> float:
        """Wait until a server replies; return the seconds since the start of its process."""
        client = Client(self.where[name], worker=worker_id("probe"))
        try:
            async with asyncio.timeout(START_S):
                while True:
                    assert self._processes[name].poll() is None, self.said(name)
                    with contextlib.suppress(Unavailable, Refused):
                        await client.ask(GetStatus(), Status, timeout_s=0.25)
                        break
        finally:
            client.close()
        return time.time() - float(psutil.Process(self._processes[name].pid).create_time())

    def cpu_s(self, name: str) -> float:
        """CPU seconds that a process has used so far."""
        times = psutil.Process(self._processes[name].pid).cpu_times()
        return float(times.user + times.system)

    def status(self, name: str) -> dict[str, Any]:
        with Admin(self.where[name]) as admin:
            return as_dict(admin.status_of(Status, timeout_s=120))

    def said(self, name: str) -> str:
        """Output of a process."""
        return (self.run_dir / "logs" / f"{name}.out").read_text()[-2000:]


def _steady(sections: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Configuration of a run that never finishes and never filters a group."""
    fixed: dict[str, dict[str, Any]] = {
        "staleness": {"max_staleness": 3},
        "trainer": {"batch_size": 48, "steps": 1_000_000},
        "rollout": {"filter": "none"},
        "coordination": {"admission": "fill"},
        "trajectories": {"shards": SHARDS, "map_mb": 128},
        "scheduler": {"map_mb": 64},
    }
    return {name: fixed.get(name, {}) | sections.get(name, {}) for name in fixed | sections}
