"""A run on this event loop: the real scheduler, trajectory and parameter servers over real sockets, and plain workers.

For tests that kill a server, ``process`` starts it as a separate process instead.
"""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from staleflow.clients.weights import NamedTensors, Publisher, Puller
from staleflow.configs.loading.load import addresses, from_json, write_resolved
from staleflow.configs.schema import Config
from staleflow.net.client import DEFAULT_LIMITS, Client, worker_id
from staleflow.net.endpoint import Endpoint
from staleflow.net.limits import TransportLimits
from staleflow.process.daemon import Stop
from staleflow.process.readiness import SLOT_VARIABLE
from staleflow.protocols.consistency.ids import BatchId, LeaseId, Lineage, Step, TrainerTerm, Version, WorkerId
from staleflow.protocols.wire.messages import (
    Assign,
    Attach,
    AttachReply,
    Batch,
    Commands,
    GetBatch,
    GetStageWork,
    GetStatus,
    InstanceStats,
    Join,
    JoinReply,
    ModelLimits,
    Pull,
    PushGroups,
    PushItem,
    PutStageResults,
    RegisterVersionReply,
    Report,
    Result,
    Results,
    StageItem,
    StageResult,
    StageWork,
    Status,
)
from staleflow.protocols.wire.messages.status import as_dict
from staleflow.protocols.wire.tensors import Array, specs_and_frames
from staleflow.protocols.wire.trajectory import GroupPayload
from staleflow.servers.parameters import main as parameters
from staleflow.servers.scheduler.main import open_service, open_store
from staleflow.servers.trajectories import main as trajectories

GROUP_SIZE = 2
GIVE_UP_S = 100.0
"""Time limit for an event that must happen; on a loaded machine, processes start and continue slowly."""
ANY_MODEL = ModelLimits()
_PROCESS = """
import sys
from pathlib import Path
from staleflow.configs.loading.load import read_run
from staleflow.servers.{role}.main import serve
run_dir = Path(sys.argv[1])
sys.exit(serve(read_run(run_dir), run_dir{shard}))
"""


def config_of(run_dir: Path, **sections: dict[str, Any] | list[dict[str, Any]]) -> Config:
    """A small run: groups of two, batches of two groups, forty prompts."""
    prompts = run_dir / "prompts.jsonl"
    prompts.parent.mkdir(parents=True, exist_ok=True)
    prompts.write_bytes(b"".join(b'{"prompt": "%d + 1", "answer": %d}\n' % (n, n + 1) for n in range(40)))
    table: dict[str, Any] = {
        "prompts": {"path": str(prompts)},
        "reward": {"run": "staleflow.examples.quickstart.task:reward", "timeout_s": 1.0, "retries": 0},
        "staleness": {"max_staleness": 2},
        "rollout": {"engine": "simulated", "group_size": GROUP_SIZE, "max_new_tokens": 100_000},
        "trainer": {"backend": "simulated", "batch_size": 2, "steps": 10},
        "scheduler": {"map_mb": 16, "lease_s": 600.0},  # a test that waits does not renew its leases
        "trajectories": {"map_mb": 16},
        "parameters": {"store": "disk"},  # tests look into the files
    }
    for name, section in sections.items():
        table[name] = section if isinstance(section, list) else table.get(name, {}) | section
    config = from_json(msgspec.json.encode(table))
    write_resolved(config, run_dir)
    return config


class Run:
    """All servers and clients of one run; ``close`` ends them."""

    def __init__(self, run_dir: Path, **sections: dict[str, Any] | list[dict[str, Any]]) -> None:
        self.run_dir = run_dir
        self.config = config_of(run_dir, **sections)
        self.where = addresses(self.config, run_dir)
        self.clients: list[Client | Publisher | Puller] = []
        self._stops: dict[str, tuple[Stop, asyncio.Task[None]]] = {}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    async def close(self) -> None:
        for client in self.clients:
            client.close()
        for process in self._processes.values():
            process.kill()
            process.wait()
        for name in reversed(list(self._stops)):
            await self.stop(name)  # raises the exception of a server that failed

    # Servers ---------------------------------------------------------------------------------------------------------

    def scheduler(self) -> None:
        self._start("scheduler", self._schedule)

    def trajectories(self, shard: int = 0) -> None:
        def serve(stop: Stop) -> Coroutine[Any, Any, None]:
            return trajectories.serve_until(stop, self.config, self.run_dir, shard)

        self._start(f"trajectories-{shard}", serve)

    def parameters(self) -> None:
        def serve(stop: Stop) -> Coroutine[Any, Any, None]:
            return parameters.serve_until(stop, self.config, self.run_dir)

        self._start("parameters", serve)

    def _start(self, name: str, serve: Callable[[Stop], Coroutine[Any, Any, None]]) -> None:
        stop = Stop()
        self._stops[name] = stop, asyncio.ensure_future(serve(stop))

    async def stop(self, name: str) -> None:
        """Stop a server as SIGTERM would; return once it has ended."""
        stop, task = self._stops.pop(name)
        stop.set("test")
        await task
        # ZeroMQ closes a listening socket in a thread of its own, after ``close`` has returned.
        await eventually(lambda: self._is_free(self.run_dir / "sock" / name))

    async def _is_free(self, path: Path) -> bool:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.setblocking(False)
            try:
                probe.connect(str(path))
            except (ConnectionRefusedError, FileNotFoundError):
                return True
            except BlockingIOError:
                pass
        return False

    async def _schedule(self, stop: Stop) -> None:
        store = open_store(self.config, self.run_dir)
        service, interpreter = open_service(self.config, self.run_dir, store)
        endpoint = Endpoint(
            self.where.scheduler, on_call=service.on_call, on_drained=service.flush, on_gone=service.on_gone
        )
        serving = asyncio.create_task(endpoint.serve())
        while not stop.is_set():
            service.tick(endpoint.peers)
            await asyncio.sleep(0.02)
        endpoint.close()
        await serving
        interpreter.trace.close()
        store.close()

    def process(self, role: str, shard: int | None = None) -> None:
        """Start a server as a separate process, as a supervisor does."""
        code = _PROCESS.format(role=role, shard="" if shard is None else f", {shard}")
        name = role if shard is None else f"{role}-{shard}"
        env = os.environ | {SLOT_VARIABLE: name}  # a restarted server succeeds the dead one
        command = (sys.executable, "-c", code)
        with (self.run_dir / f"{name}.err").open("wb") as err:
            self._processes[name] = subprocess.Popen([*command, str(self.run_dir)], stderr=err, env=env)

    def ended(self, name: str) -> tuple[int, str]:
        """Wait for a process to exit without a signal; return its exit code and its last line of output."""
        code = self._processes.pop(name).wait(timeout=GIVE_UP_S)
        said = (self.run_dir / f"{name}.err").read_text(errors="replace").splitlines()
        return code, said[-1] if said else ""

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> int:
        """Send a signal; return the exit code."""
        process = self._processes.pop(name)
        os.kill(process.pid, number)
        return process.wait(timeout=GIVE_UP_S)

    # Workers ---------------------------------------------------------------------------------------------------------

    def client(self, address: str, worker: WorkerId, limits: TransportLimits = DEFAULT_LIMITS) -> Client:
        client = Client(address, worker=worker, limits=limits)
        self.clients.append(client)
        return client

    def shard(self, worker: WorkerId, shard: int = 0, limits: TransportLimits = DEFAULT_LIMITS) -> Client:
        return self.client(self.where.trajectories[shard], worker, limits)

    async def status(self, address: str) -> dict[str, Any]:
        client = Client(address, worker=worker_id("status"))
        try:
            return as_dict(await client.ask(GetStatus(), Status))
        finally:
            client.close()

    async def trainer(self, name: str = "trainer", model: ModelLimits = ANY_MODEL) -> "Trainer":
        """Return a trainer that has joined at the newest version."""
        trainer = Trainer(self, worker_id(name), model)
        await trainer.join()
        return trainer

    async def rollout(self, name: str = "rollout-0", capacity: int = 8) -> "Rollout":
        """Return a rollout worker that is attached."""
        rollout = Rollout(self, worker_id(name))
        await rollout.attach(capacity)
        return rollout


class Trainer:
    """Publish small weights and take batches."""

    def __init__(self, run: Run, worker: WorkerId, model: ModelLimits = ANY_MODEL) -> None:
        self.worker = worker
        self.model = model
        self.scheduler = run.client(run.where.scheduler, worker)
        self.publisher = Publisher(run.where.parameters, worker=worker)
        run.clients.append(self.publisher)
        self.joined = JoinReply(trainer_term=TrainerTerm(0), lineage=Lineage(0), version=Version(-1))

    async def join(self, version: int = 0) -> JoinReply:
        """Join as a later trainer that replaces this one, as after a restart by a supervisor."""
        hello = Attach(worker=self.worker, name="trainer", role="trainer", slot="trainer")
        attached = await self.scheduler.ask(hello, AttachReply)
        held = Version(max(attached.version, version))
        join = Join(trainer=self.worker, lineage=attached.lineage, version=held, model=self.model)
        self.joined = await self.scheduler.ask(join, JoinReply)
        return self.joined

    async def publish(self, version: int, weights: NamedTensors, batch: BatchId | None = None) -> RegisterVersionReply:
        return await self.publisher.publish(
            weights,
            trainer_term=self.joined.trainer_term,
            lineage=self.joined.lineage,
            version=Version(version),
            batch=batch,
        )

    async def next_batch(self, step: int) -> Batch:
        return await self.scheduler.ask(
            GetBatch(trainer_term=self.joined.trainer_term, step=Step(step), wait_ms=1000), Batch, timeout_s=GIVE_UP_S
        )


@dataclass
class Rollout:
    """Take leases and push groups of random tokens."""

    run: Run
    worker: WorkerId
    held: dict[LeaseId, Assign] = field(default_factory=dict[LeaseId, Assign])
    ack: int = 0
    version: int = -1

    async def attach(self, capacity: int) -> None:
        self.scheduler = self.run.client(self.run.where.scheduler, self.worker)
        self.shards = [self.run.shard(self.worker, shard) for shard in range(len(self.run.where.trajectories))]
        name = self.worker.rpartition(".")[0]  # also its slot, as under a supervisor: the next worker succeeds it
        hello = Attach(worker=self.worker, name=name, role="rollout", capacity=capacity, slot=name)
        await eventually(lambda: self._all_shards(hello))

    async def _all_shards(self, hello: Attach) -> bool:
        return all((await self.scheduler.ask(hello, AttachReply)).shards)

    async def until_room(self, shard: int = 0) -> None:
        """Wait until the shard accepts pushes: it has room and has learned the limits of the model."""
        await self.shards[shard].ask(PushGroups(items=[]), Results, timeout_s=GIVE_UP_S)

    async def leases(self, count: int) -> list[Assign]:
        """Wait until at least ``count`` leases are held; return them."""
        async with asyncio.timeout(GIVE_UP_S):
            while len(self.held) < count:
                stats = InstanceStats(version=Version(self.version))
                report = Report(worker=self.worker, ack=self.ack, held=list(self.held), stats=stats, wait_ms=200)
                answer = await self.scheduler.ask(report, Commands)
                for number, command in enumerate(answer.commands, start=answer.first):
                    self.ack = max(self.ack, number)
                    if isinstance(command, Pull):
                        self.version = command.version
                    elif isinstance(command, Assign):
                        self.held[command.lease] = command
        return list(self.held.values())

    async def push(
        self, *assigns: Assign, seed: int = 0, read: int = 0, prompt: int = 3, timeout_s: float | None = GIVE_UP_S
    ) -> list[Result]:
        """Push groups for these leases, all of one shard."""
        items: list[PushItem] = []
        frames: list[memoryview] = []
        for assign in assigns:
            made = payload(assign.version, seed=seed + assign.group, read=read, prompt=prompt)
            specs, more = specs_and_frames(made.to_arrays())
            frames += more
            items.append(
                PushItem(group=assign.group, lease=assign.lease, worker=self.worker, truncated=False, frames=specs)
            )
        shard = self.shards[assigns[0].shard]
        answer = await shard.ask(PushGroups(items=items), Results, frames, timeout_s=timeout_s)
        for assign in assigns:
            self.held.pop(assign.lease, None)
        return answer.results


def payload(
    version: int, *, seed: int = 0, tokens: int = 5, samples: int = GROUP_SIZE, read: int = 0, prompt: int = 3
) -> GroupPayload:
    """Random tokens written by ``version``; the first ``read`` tokens of each sample come from an environment."""
    random = np.random.default_rng(seed)
    total = tokens * samples
    written = np.tile(np.arange(tokens) >= read, samples)
    return GroupPayload(
        prompt_ids=np.arange(prompt, dtype=np.int32),
        lengths=np.full(samples, tokens, np.int32),
        token_ids=random.integers(0, 1000, total, dtype=np.int32),
        logprobs=np.where(written, -random.random(total, dtype=np.float32), np.float32(0)),
        loss_mask=written.astype(np.uint8),
        segments=np.asarray([(sample, 0, version, tokens) for sample in range(samples)], np.int64),
        finish=np.zeros(samples, np.uint8),
    )


class StageWorker:
    """Take groups of a stage, by default the reward, and finish them."""

    def __init__(self, run: Run, name: str = "reward-0", shard: int = 0, stage: str = "reward") -> None:
        self.worker = worker_id(name)
        self.stage = stage
        self.client = run.shard(self.worker, shard)

    async def take(
        self, most: int = 16, wait_ms: int = 20_000, held: Sequence[StageItem] = ()
    ) -> tuple[list[StageItem], list[memoryview]]:
        """Take groups; ``held``: groups of earlier calls that the worker reports as still in progress."""
        tickets = [item.ticket for item in held]
        take = GetStageWork(stage=self.stage, worker=self.worker, max_groups=most, wait_ms=wait_ms, held=tickets)
        work, frames = await self.client.call(take)
        assert isinstance(work, StageWork)
        return work.items, frames

    async def finish(self, items: Sequence[StageItem], rewards: Sequence[float] = (0.0, 1.0)) -> list[Result]:
        return await self.give(items, {"reward": np.asarray(rewards, np.float32)})

    async def give(self, items: Sequence[StageItem], columns: dict[str, Array]) -> list[Result]:
        """Finish each group with the same columns."""
        results: list[StageResult] = []
        frames: list[memoryview] = []
        for item in items:
            specs, more = specs_and_frames(columns)
            frames += more
            results.append(StageResult(group=item.group, lease=item.lease, ticket=item.ticket, frames=specs))
        finish = PutStageResults(stage=self.stage, worker=self.worker, results=results)
        return (await self.client.ask(finish, Results, frames)).results

    async def fail(self, item: StageItem, why: str) -> list[Result]:
        result = StageResult(group=item.group, lease=item.lease, ticket=item.ticket, frames=[], error=why)
        finish = PutStageResults(stage=self.stage, worker=self.worker, results=[result])
        return (await self.client.ask(finish, Results)).results


WEIGHTS: dict[str, Array] = {
    "embed": np.arange(12, dtype=np.float32).reshape(3, 4),
    "head": np.arange(7, dtype=np.uint16),
    "scale": np.asarray(1.5, np.float32),
}
"""Weights of version 0; ``head`` stands for bfloat16."""


async def eventually(check: Any, within_s: float = GIVE_UP_S) -> Any:
    """Return the first true result of ``await check()``."""
    async with asyncio.timeout(within_s):
        while not (answer := await check()):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        return answer


@asynccontextmanager
async def produced(run: Run) -> AsyncGenerator[None]:
    """Run a rollout worker and a stage worker while the context is open."""
    rollout, stage = await run.rollout(), StageWorker(run)

    async def roll_out() -> None:
        while True:
            try:
                await rollout.push(*(await rollout.leases(1)))
            except TimeoutError:
                continue

    async def reward() -> None:
        while True:
            items, _ = await stage.take()
            await stage.finish(items)

    working = [asyncio.create_task(roll_out()), asyncio.create_task(reward())]
    try:
        yield
    finally:
        for task in working:
            task.cancel()
        await asyncio.gather(*working, return_exceptions=True)
