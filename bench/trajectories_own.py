"""The service itself as a contender of ``bench.trajectories``: real scheduler, real shard, shipped clients.

Producers take leases and push groups of eight trajectories through the worker's own ``Pusher``. The consumer joins as a
trainer, waits for sealed batches, fetches them through the trainer's own ``BatchStream`` and consumes them. Rewards
come with the payload, as an environment's do. Weights are a number: the consumer registers versions in the place of the
parameter server. Generation and training take no time.
"""

import asyncio
import multiprocessing
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path

import numpy as np
import uvloop

from bench.trajectories_measure import PRODUCERS, TAKE, TRAJECTORY_BYTES, Row, cpu_seconds, family, watch
from staleflow.clients.rollout.pushes import Pusher
from staleflow.clients.rollout.slab_writer import SlabWriter
from staleflow.clients.trainer.data.batch import assemble
from staleflow.clients.trainer.data.prefetch import BatchStream
from staleflow.configs.loading.load import addresses, read_run, write_resolved
from staleflow.configs.schema import (
    Config,
    Coordination,
    Durability,
    Environment,
    Prompts,
    Reward,
    Rollout,
    Scheduler,
    Staleness,
    Trajectories,
)
from staleflow.configs.trainer import Trainer
from staleflow.net.client import Client, worker_id
from staleflow.process.host import reuse_memory
from staleflow.protocols.consistency.ids import BatchId, LeaseId, Lineage, Step, Version
from staleflow.protocols.wire.messages import (
    Assign,
    Attach,
    AttachReply,
    Commands,
    InstanceStats,
    Join,
    JoinReply,
    Pull,
    RegisterCheckpoint,
    RegisterCheckpointReply,
    RegisterVersion,
    RegisterVersionReply,
    Report,
    Result,
)
from staleflow.protocols.wire.stages import ENVIRONMENT_REWARD
from staleflow.protocols.wire.tensors import Array
from staleflow.protocols.wire.trajectory import GroupPayload

GROUP = 8
"""Trajectories of a group."""
TOKENS = TRAJECTORY_BYTES // 9
"""Tokens of a trajectory: an id, a log-probability and a mask byte each."""
CHECKPOINT_EVERY = 4
STEP_S = 0.25
"""Seconds of a step, for a trainer that does train."""
FIRST_STEPS = 2
"""Number of first steps that are not measured, because all processes are starting."""
ROWS = 1_000
REWARDS = np.linspace(0, 1, GROUP, dtype=np.float32)
_PROCESS = """
import sys
from pathlib import Path
from staleflow.configs.loading.load import read_run
from staleflow.servers.{role}.main import serve
sys.exit(serve(read_run(Path(sys.argv[1])), Path(sys.argv[1]){shard}))
"""
_Context = multiprocessing.get_context("spawn")


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One configuration of the service."""

    name: str
    tcp: bool = False
    shared: bool = True
    """Workers write into slabs and the trainer maps them; otherwise both act as on other hosts than the shard's."""
    durability: Durability = "process"
    shards: int = 1
    groups: int = TAKE // GROUP
    """Groups of a batch."""
    max_staleness: int = 2
    producers: int = PRODUCERS
    step_s: float = 0.0
    """Seconds of training; 0: batches are only taken."""
    tokens: int = TOKENS
    """Tokens of each trajectory."""


def measured(shape: Shape, *, warm_up_s: float, seconds: float, folder: Path | None = None) -> Row:
    """Throughput, CPU and memory of one shape, then the latency of one put at a time."""
    row = Row(what=shape.name)
    with _running(shape, folder) as (taken, assembled):
        watch(row, taken, warm_up_s=warm_up_s, seconds=seconds)
        row.extra["assemble_ms"] = 1000 * assembled()
    return row


def shard_cpu_s(shape: Shape, *, warm_up_s: float, seconds: float) -> float:
    """CPU seconds of the trajectory server for each group that is pushed, fetched and consumed."""
    with _running(shape, None) as (taken, _):
        watch(Row(what=shape.name), taken, warm_up_s=warm_up_s, seconds=0.0)
        [server] = [process for process in family() if "trajectories.main" in " ".join(process.cmdline())]
        before, count = cpu_seconds([server])[server.pid], taken()
        time.sleep(seconds)
        return (cpu_seconds([server])[server.pid] - before) * GROUP / max(taken() - count, 1)


def latency(shape: Shape, *, seconds: float, folder: Path | None = None) -> float:
    """p50 in ms of one put of two groups at a time: on-policy, so that the next comes when the last is consumed."""
    single = replace(shape, groups=2, max_staleness=0, producers=1)
    with _running(single, folder) as (taken, p50):
        watch(Row(what=shape.name), taken, warm_up_s=1.0, seconds=seconds)
        return 1000 * p50()


def waiting(shape: Shape, *, seconds: float, folder: Path | None = None) -> float:
    """Share of its time that a trainer waits for data when it trains ``STEP_S`` a step while the next batch arrives."""
    with _running(replace(shape, step_s=STEP_S), folder) as (taken, share):
        watch(Row(what=shape.name), taken, warm_up_s=2 * STEP_S, seconds=seconds)
        return share()


@contextmanager
def _running(shape: Shape, folder: Path | None) -> Generator[tuple[Callable[[], int], Callable[[], float]]]:
    with tempfile.TemporaryDirectory(prefix="sf-", dir=folder) as place:
        run_dir = Path(place) / "run"
        _config_of(shape, run_dir)
        names = ["scheduler", *(f"trajectories-{shard}" for shard in range(shape.shards))]
        servers = [_server(name, run_dir) for name in names]
        taken, number = _Context.Value("q", 0), _Context.Value("d", 0.0)
        workers = [_Context.Process(target=produce, args=(run_dir, n, shape)) for n in range(shape.producers)]
        workers.append(_Context.Process(target=consume, args=(run_dir, shape, taken, number)))
        for worker in workers:
            worker.start()

        def count() -> int:
            if any(not worker.is_alive() for worker in workers):
                raise RuntimeError(f"{shape.name}: a worker has ended")
            return int(taken.value)

        try:
            yield count, lambda: number.value
        finally:
            for worker in workers:
                worker.kill()
                worker.join()
            for server in servers:
                server.terminate()
            for server in servers:
                server.wait(30)


def _server(name: str, run_dir: Path) -> "subprocess.Popen[bytes]":
    role, _, shard = name.partition("-")
    code = _PROCESS.format(role=role, shard=f", {shard}" if shard else "")
    return subprocess.Popen([sys.executable, "-c", code, str(run_dir)], stderr=subprocess.DEVNULL)


def _config_of(shape: Shape, run_dir: Path) -> Config:
    prompts = run_dir / "prompts.jsonl"
    run_dir.mkdir(parents=True, exist_ok=True)
    prompts.write_bytes(b"".join(b'{"prompt": "%d"}\n' % number for number in range(ROWS)))
    config = Config(
        prompts=Prompts(path=str(prompts)),
        environment=Environment(run="bench.none:Environment"),  # never imported: its rewards come with the groups
        reward=Reward(run="staleflow.examples.quickstart.task:reward"),
        staleness=Staleness(max_staleness=shape.max_staleness),
        rollout=Rollout(engine="simulated", group_size=GROUP),
        coordination=Coordination(routing="least_loaded", admission="fill"),
        trainer=Trainer(backend="simulated", batch_size=shape.groups, steps=10_000_000),
        scheduler=Scheduler(durability=shape.durability, bind=_free() if shape.tcp else ""),
        trajectories=Trajectories(
            durability=shape.durability,
            shards=shape.shards,
            bind=[_free() for _ in range(shape.shards)] if shape.tcp else [],
        ),
    )
    write_resolved(config, run_dir)
    return config


def _free() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


# The producers -------------------------------------------------------------------------------------------------------


def produce(run_dir: Path, number: int, shape: Shape) -> None:
    """Push all leased groups, endlessly."""
    reuse_memory()
    uvloop.run(_produce(run_dir, number, shape))


async def _produce(run_dir: Path, number: int, shape: Shape) -> None:
    config = read_run(run_dir)
    where, name = addresses(config, run_dir), f"rollout-{number}"
    me = worker_id(name)
    scheduler = Client(where.scheduler, worker=me)
    shards = [Client(address, worker=me) for address in where.trajectories]
    capacity = -(-shape.groups * (shape.max_staleness + 1) // shape.producers)
    hello = Attach(worker=me, name=name, role="rollout", capacity=capacity)
    while not all((await scheduler.ask(hello, AttachReply, timeout_s=None)).shards):  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    held: dict[LeaseId, Assign] = {}

    def settled(assign: Assign, result: Result) -> None:
        if result.code is not None:
            raise RuntimeError(f"a push was refused: {result}")
        held.pop(assign.lease, None)

    pushers = [Pusher(shard, me, settled, SlabWriter(shard, me) if shape.shared else None) for shard in shards]
    running = [asyncio.ensure_future(pusher.run()) for pusher in pushers]
    arrays, ack, version = _arrays(number, shape.tokens), 0, Version(-1)
    segments = _segments(version, shape.tokens)
    while not any(task.done() for task in running):
        stats = InstanceStats(version=version)
        report = Report(worker=me, ack=ack, held=[*held], stats=stats, wait_ms=500)
        answer = await scheduler.ask(report, Commands, timeout_s=None)
        for place, command in enumerate(answer.commands, start=answer.first):
            if place <= ack:
                continue
            ack = place
            if isinstance(command, Pull):
                version = command.version
            elif isinstance(command, Assign):
                held[command.lease] = command
                if command.version != segments[0, 2]:
                    segments = _segments(command.version, shape.tokens)
                pushers[command.shard].put(command, _payload(arrays, segments))
    for task in running:
        task.result()


def _arrays(seed: int, tokens: int) -> dict[str, Array]:
    random, total = np.random.default_rng(seed), GROUP * tokens
    return {
        "lengths": np.full(GROUP, tokens, np.int32),
        "token_ids": random.integers(0, 150_000, total, dtype=np.int32),
        "logprobs": -random.random(total, dtype=np.float32),
        "loss_mask": np.ones(total, np.uint8),
        "finish": np.zeros(GROUP, np.uint8),
    }


def _segments(version: Version, tokens: int) -> Array:
    return np.asarray([(sample, 0, version, tokens) for sample in range(GROUP)], np.int64)


def _payload(arrays: dict[str, Array], segments: Array) -> GroupPayload:
    """A group as an engine's arrays; its prompt contains the time of its put."""
    now = time.monotonic_ns()
    return GroupPayload(
        prompt_ids=np.array([now >> 31, now & 0x7FFF_FFFF], np.int32),
        segments=segments,
        stages={ENVIRONMENT_REWARD: REWARDS},
        columns={},
        **arrays,
    )


def _put_ns(payload: GroupPayload) -> int:
    high, low = payload.prompt_ids.tolist()
    return int(high) << 31 | int(low)


# The consumer --------------------------------------------------------------------------------------------------------


def consume(run_dir: Path, shape: Shape, taken: "Synchronized[int]", number: "Synchronized[float]") -> None:
    """Take batches endlessly. ``number`` is the seconds of laying one out; with batches of two groups, seconds from put
    to here, p50; with steps that take time, the share of it that is spent waiting."""
    reuse_memory()
    uvloop.run(_consume(run_dir, shape, taken, number))


async def _consume(run_dir: Path, shape: Shape, taken: "Synchronized[int]", number: "Synchronized[float]") -> None:
    config = read_run(run_dir)
    where = addresses(config, run_dir)
    me, versions = worker_id("trainer"), worker_id("parameters")
    parameters = Client(where.scheduler, worker=versions)
    scheduler = Client(where.scheduler, worker=me)
    shards = [Client(address, worker=me) for address in where.trajectories]
    hello = Attach(worker=versions, name="parameters", role="parameters", endpoint="ipc:///bench")
    await parameters.ask(hello, AttachReply, timeout_s=None)
    await scheduler.ask(Attach(worker=me, name="trainer", role="trainer"), AttachReply, timeout_s=None)
    join = Join(trainer=me, lineage=Lineage(0), version=Version(0))
    term = (await scheduler.ask(join, JoinReply, timeout_s=None)).trainer_term
    stream = BatchStream(scheduler, shards, term, mapped=shape.shared)

    async def register(version: int, batch: BatchId | None) -> None:
        sent = RegisterVersion(
            trainer_term=term,
            lineage=Lineage(0),
            version=Version(version),
            batch=batch,
            sha=f"{version:064d}",
            nbytes=8,
        )
        await parameters.ask(sent, RegisterVersionReply, timeout_s=None)
        if version % CHECKPOINT_EVERY == 0:
            kept = RegisterCheckpoint(trainer_term=term, lineage=Lineage(0), version=Version(version))
            await scheduler.ask(kept, RegisterCheckpointReply, timeout_s=None)

    await register(0, None)
    if shape.step_s:
        await _train(stream, shape.step_s, taken, number, register)
        return
    seconds: list[float] = []
    step, coming = 0, asyncio.ensure_future(stream.groups(Step(0)))
    while True:
        batch, groups = await coming
        if shape.groups == 2:
            seconds.append((time.monotonic_ns() - min(_put_ns(item.payload) for item in groups)) / 1e9)
            number.value = sorted(seconds)[len(seconds) // 2]
        elif step % 256 == 0:
            started = time.perf_counter()
            assemble(batch, groups)
            number.value = time.perf_counter() - started
        coming = asyncio.ensure_future(stream.groups(Step(step + 1)))
        taken.value += len(groups) * GROUP
        del groups
        step += 1
        await register(step, batch.batch)


async def _train(
    stream: BatchStream,
    step_s: float,
    taken: "Synchronized[int]",
    share: "Synchronized[float]",
    register: Callable[[int, BatchId | None], Awaitable[None]],
) -> None:
    """Like the shipped trainer, fetch and lay out the next batch while this one is trained."""
    feeding = asyncio.ensure_future(stream.feed(Step(0), 1 << 40))
    waited_s, began, step = 0.0, 0.0, 0
    while not feeding.done():
        asked = time.perf_counter()
        data = await stream.get()
        now = time.perf_counter()
        if step == FIRST_STEPS:
            began = now
        elif step > FIRST_STEPS:
            waited_s += now - asked
            share.value = waited_s / (now - began)
        await asyncio.sleep(step_s)
        taken.value += len(data.rewards)
        step += 1
        await register(step, data.batch)
