"""A real scheduler process and real sockets of all its peers, without payloads or weights."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from staleflow.configs.loading.load import addresses, write_resolved
from staleflow.configs.schema import Config, Prompts, Reward, Rollout, Scheduler, Staleness
from staleflow.configs.trainer import Trainer
from staleflow.net.client import DEFAULT_LIMITS, Client, worker_id
from staleflow.net.limits import TransportLimits
from staleflow.protocols.consistency.effects import ReleaseWhy
from staleflow.protocols.consistency.ids import BatchId, LeaseId, Lineage, Segment, Step, TrainerTerm, Version, WorkerId
from staleflow.protocols.wire.messages import (
    Abort,
    Assign,
    Attach,
    AttachReply,
    Batch,
    Commands,
    Done,
    GetBatch,
    GetStatus,
    InstanceStats,
    Join,
    JoinReply,
    Op,
    Operations,
    Pull,
    Pulled,
    RegisterCheckpoint,
    RegisterCheckpointReply,
    RegisterOccupy,
    RegisterPush,
    RegisterRelease,
    RegisterVersion,
    RegisterVersionReply,
    Report,
    Result,
    Results,
    Status,
)
from staleflow.protocols.wire.messages.status import as_dict
from staleflow.trace.audit.report import AuditReport, audit

SERVE = """
import sys
from pathlib import Path
from staleflow.configs.loading.load import read_run
from staleflow.servers.scheduler.main import serve
sys.exit(serve(read_run(Path(sys.argv[1])), Path(sys.argv[1])))
"""

TIMEOUT_S = 100.0
"""Time limit of calls and waits, also for restarts of the scheduler, which take long on a busy machine."""


def config(
    *, batch_size: int = 2, max_staleness: int = 1, lease_s: float = 30.0, map_mb: int = 64, steps: int = 100
) -> Config:
    return Config(
        prompts=Prompts(source="nobody:opens"),
        reward=Reward(run="nobody:calls"),
        staleness=Staleness(max_staleness=max_staleness),
        rollout=Rollout(engine="simulated", group_size=2),
        trainer=Trainer(backend="simulated", batch_size=batch_size, steps=steps),
        scheduler=Scheduler(lease_s=lease_s, map_mb=map_mb),
    )


def sha(number: int) -> str:
    return f"{number:064d}"


class World:
    """One run directory; processes start and stop in it."""

    def __init__(self, run_dir: Path, settings: Config) -> None:
        self.run_dir = run_dir
        self.config = settings
        self.address = addresses(settings, run_dir).scheduler
        self._process: subprocess.Popen[bytes] | None = None
        self._clients: list[Client] = []
        write_resolved(settings, run_dir)

    def start(self) -> None:
        """Start, and wait until the process accepts connections."""
        socket = Path(self.address.removeprefix("ipc://"))
        socket.unlink(missing_ok=True)
        self.spawn()
        assert self._process is not None
        deadline = time.monotonic() + TIMEOUT_S
        while not socket.exists():
            assert self._process.poll() is None, self.ended()
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def spawn(self) -> None:
        self._process = subprocess.Popen([sys.executable, "-c", SERVE, str(self.run_dir)], stderr=subprocess.PIPE)

    def kill(self) -> None:
        """Kill the process with SIGKILL."""
        assert self._process is not None
        self._process.kill()
        self._process.wait(TIMEOUT_S)
        self._drop()

    def pause(self, seconds: float) -> None:
        """Send SIGSTOP, then SIGCONT after ``seconds``; no peer runs meanwhile either."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        self._process.send_signal(signal.SIGCONT)

    def stop(self) -> int:
        """Send SIGTERM; return the exit code."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        code = self._process.wait(TIMEOUT_S)
        self._drop()
        return code

    def ended(self) -> tuple[int, str]:
        """Return the exit code and the last line of stderr of a process that is expected to exit."""
        assert self._process is not None
        _, err = self._process.communicate(timeout=TIMEOUT_S)
        code = self._process.returncode
        self._drop()
        return code, err.decode().strip().splitlines()[-1]

    def _drop(self) -> None:
        assert self._process is not None
        assert self._process.stderr is not None
        self._process.stderr.close()
        self._process = None

    def close(self) -> None:
        for client in self._clients:
            client.close()
        if self._process is not None:
            self.kill()

    def client(self, worker: WorkerId, limits: TransportLimits = DEFAULT_LIMITS) -> Client:
        client = Client(self.address, worker=worker, limits=limits)
        self._clients.append(client)
        return client

    async def status(self) -> dict[str, Any]:
        client = self.client(worker_id("monitor"))
        return as_dict(await client.ask(GetStatus(), Status, timeout_s=TIMEOUT_S))

    async def until(self, condition: str, wanted: object, within_s: float = TIMEOUT_S) -> dict[str, Any]:
        """Wait until ``status[condition]`` is ``wanted``; dots select nested fields."""
        client = self.client(worker_id("monitor"))
        deadline = time.monotonic() + within_s
        while True:
            values = as_dict(await client.ask(GetStatus(), Status, timeout_s=TIMEOUT_S))
            found: Any = values
            for part in condition.split("."):
                found = found[part]
            if found == wanted:
                return values
            assert time.monotonic() < deadline, f"{condition} is {found}, not {wanted}: {values}"
            await asyncio.sleep(0.02)

    async def until_why(self, text: str) -> dict[str, Any]:
        """Wait until the reason for which the run waits contains ``text``."""
        deadline = time.monotonic() + TIMEOUT_S
        while text not in (values := await self.status())["why"]:
            assert time.monotonic() < deadline, values["why"]
            await asyncio.sleep(0.02)
        return values

    def audit(self) -> AuditReport:
        report = audit(self.run_dir / "trace.jsonl")
        assert report.violations == []
        return report


class Someone:
    """An attached process."""

    def __init__(self, world: World, name: str, role: str, **attach: Any) -> None:
        self.worker = worker_id(name)
        self.client = world.client(self.worker)
        attach.setdefault("slot", name)  # same slot as under one supervisor: the next of the name succeeds it at once
        self._attach = Attach(worker=self.worker, name=name, role=role, pid=os.getpid(), **attach)

    async def attach(self) -> AttachReply:
        return await self.client.ask(self._attach, AttachReply)


class Shard(Someone):
    """A shard that registers pushes and stores no bytes."""

    def __init__(self, world: World, *, rows: int = 1000, prompts_sha: str = "p") -> None:
        super().__init__(
            world, "trajectories-0", "trajectories", endpoint="ipc:///none", rows=rows, prompts_sha=prompts_sha
        )

    async def operate(self, *ops: Op) -> list[Result]:
        return (await self.client.ask(Operations(ops=list(ops)), Results, timeout_s=TIMEOUT_S)).results

    def push(self, assign: Assign, worker: WorkerId, tokens: int = 6) -> RegisterPush:
        return RegisterPush(
            group=assign.group,
            lease=assign.lease,
            worker=worker,
            shard=0,
            sha=sha(assign.lease),
            nbytes=100,
            truncated=False,
            segments=[Segment(assign.lineage, assign.version, tokens)],
            samples=[tokens // 2] * 2,
            sequence_tokens=tokens,
        )

    def fat_push(self, assign: Assign, worker: WorkerId, nbytes: int) -> RegisterPush:
        """Return a push that takes much room in the scheduler's store."""
        return msgspec.structs.replace(self.push(assign, worker), sha="f" * nbytes)

    def occupy(self, assign: Assign) -> RegisterOccupy:
        return RegisterOccupy(group=assign.group, lease=assign.lease)

    def release(self, assign: Assign, why: ReleaseWhy) -> RegisterRelease:
        return RegisterRelease(group=assign.group, lease=assign.lease, why=why)

    async def finish(self, assigns: Sequence[Assign], worker: WorkerId) -> None:
        """Register the push and the occupation of each group."""
        results = await self.operate(*(self.push(assign, worker) for assign in assigns))
        results += await self.operate(*(self.occupy(assign) for assign in assigns))
        assert [result.code for result in results] == [None] * len(results)


class Instance(Someone):
    """A passive instance: the test decides when it reports."""

    def __init__(self, world: World, name: str = "rollout-0", capacity: int = 4) -> None:
        super().__init__(world, name, "rollout", capacity=capacity)
        self.held: dict[LeaseId, Assign] = {}
        self.aborted: list[LeaseId] = []
        self.drain = False
        self.stats = InstanceStats()
        self.pause_s = 0.0
        """Seconds by which each load raises its ``paused_s``."""
        self.ack = 0

    async def report(self, wait_ms: int = 300) -> Commands:
        """Send one report and apply the commands of its answer."""
        report = Report(
            worker=self.worker,
            ack=self.ack,
            held=list(self.held),
            stats=self.stats,
            wait_ms=wait_ms,
        )
        commands = await self.client.ask(report, Commands, timeout_s=TIMEOUT_S)
        self.drain = commands.drain
        for number, command in enumerate(commands.commands, commands.first):
            if number > self.ack:
                self.ack = number
                await self._obey(command)
        return commands

    async def _obey(self, command: object) -> None:
        match command:
            case Assign():
                self.held[command.lease] = command
            case Abort():
                self.held.pop(command.lease, None)
                self.aborted.append(command.lease)
            case Pull():
                weights = {"lineage": command.lineage, "version": command.version}
                paused_s = self.stats.paused_s + self.pause_s
                self.stats = msgspec.structs.replace(self.stats, **weights, paused_s=paused_s)
                pulled = Pulled(worker=self.worker, sha=sha(command.version), ok=True, **weights)  # type: ignore[arg-type]
                await self.client.ask(pulled, Done, timeout_s=TIMEOUT_S)
            case _:
                raise AssertionError(f"unexpected {command}")

    async def until_held(self, num_groups: int) -> list[Assign]:
        """Report until it holds ``num_groups`` groups."""
        deadline = time.monotonic() + TIMEOUT_S
        while len(self.held) < num_groups:
            assert time.monotonic() < deadline, f"{self.worker} holds {len(self.held)} groups, not {num_groups}"
            await self.report()
        return list(self.held.values())

    def let_go(self, assigns: Sequence[Assign]) -> None:
        for assign in assigns:
            self.held.pop(assign.lease, None)


class TrainerOf(Someone):
    """A trainer without training; the test decides when it publishes."""

    term = TrainerTerm(0)

    def __init__(self, world: World) -> None:
        super().__init__(world, "trainer", "trainer")

    async def join(self, version: int = 0, lineage: int = 0) -> JoinReply:
        joined = await self.client.ask(
            Join(trainer=self.worker, lineage=Lineage(lineage), version=Version(version)), JoinReply
        )
        self.term = joined.trainer_term
        return joined

    async def publish(self, version: int, batch: BatchId | None = None, lineage: int = 0) -> RegisterVersionReply:
        return await self.client.ask(
            RegisterVersion(
                trainer_term=self.term,
                lineage=Lineage(lineage),
                version=Version(version),
                batch=batch,
                sha=sha(version),
                nbytes=10,
            ),
            RegisterVersionReply,
            timeout_s=TIMEOUT_S,
        )

    async def next_batch(self, step: int, timeout_s: float = TIMEOUT_S) -> Batch:
        return await self.client.ask(
            GetBatch(trainer_term=self.term, step=Step(step), wait_ms=200), Batch, timeout_s=timeout_s
        )

    async def checkpoint(self, version: int, lineage: int = 0) -> None:
        await self.client.ask(
            RegisterCheckpoint(trainer_term=self.term, lineage=Lineage(lineage), version=Version(version)),
            RegisterCheckpointReply,
            timeout_s=TIMEOUT_S,
        )


class Cast:
    """Every peer that a run needs, attached, with version 0 published."""

    def __init__(self, world: World, *, capacity: int = 4, rows: int = 1000) -> None:
        self.shard = Shard(world, rows=rows)
        self.parameters = Someone(world, "parameters", "parameters", endpoint="ipc:///none")
        self.trainer = TrainerOf(world)
        self.instance = Instance(world, capacity=capacity)

    async def enter(self) -> "Cast":
        for someone in (self.shard, self.parameters, self.trainer, self.instance):
            await someone.attach()
        await self.trainer.join()
        await self.trainer.publish(0)
        return self

    async def finish(self, num_groups: int) -> list[Assign]:
        """Generate ``num_groups`` groups, from lease to occupied."""
        assigns = (await self.instance.until_held(num_groups))[:num_groups]
        await self.shard.finish(assigns, self.instance.worker)
        self.instance.let_go(assigns)
        return assigns
