"""A server that restarts with a very large store, or with a very large number of clients."""

import asyncio
import json
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import uvloop

from staleflow.net.client import Client, worker_id
from staleflow.protocols.consistency.ids import Version
from staleflow.protocols.wire.messages import (
    Assign,
    Attach,
    AttachReply,
    Commands,
    InstanceStats,
    Operations,
    PushGroups,
    PushItem,
    Report,
    Results,
)
from staleflow.protocols.wire.tensors import specs_and_frames
from tests.audit import prf
from tests.process.actors import Trainer
from tests.process.fleet import Fleet

ROOM = 2_000
"""Extra groups for one worker, and for one step, beyond the requested number: no step is ever sealed."""
AT_ONCE = 64
PROBE_INTERVAL_S = 0.01
QUIET_S = 5.0
STORM_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """Downtime of a server that restarts with a full store."""

    LIMIT_S: ClassVar[float] = 5.0
    records: int
    restart_s: dict[str, float]
    """Time from ``kill -9`` and the start of a new process until the process does its job again."""
    cpu_s: dict[str, float]
    """CPU part of ``restart_s``. The process spent the rest waiting for its turn on a busy machine."""
    pushes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Storm:
    """Cost of a thousand simultaneous handshakes."""

    LIMIT_S: ClassVar[float] = 10.0
    MAX_TIMES: ClassVar[float] = 3.0
    back: int
    back_s: float
    before_p99_ms: float
    after_p99_ms: float


class Bulk:
    """Rollout worker that pushes everything it has leases for, with many groups in each message."""

    def __init__(self, fleet: Fleet) -> None:
        self._me = worker_id("bulk")
        self._seed = fleet.config.seed
        self._scheduler = Client(fleet.where["scheduler"], worker=self._me)
        self._shards = [Client(fleet.where[name], worker=self._me) for name in fleet.shards]
        self._ack = 0
        self.held: dict[int, Assign] = {}
        self.pushed = 0

    async def attach(self) -> None:
        hello = Attach(worker=self._me, name="bulk", role="rollout", capacity=ROOM)
        await self._scheduler.ask(hello, AttachReply, timeout_s=None)

    async def lease(self) -> None:
        """Take more leases, if any come within a second."""
        stats = InstanceStats(version=Version(0))
        report = Report(worker=self._me, ack=self._ack, held=[a.lease for a in self.held.values()], stats=stats)
        answer = await self._scheduler.ask(report, Commands, timeout_s=None)
        for number, command in enumerate(answer.commands, start=answer.first):
            self._ack = max(self._ack, number)
            if isinstance(command, Assign):
                self.held[command.lease] = command

    async def push(self) -> None:
        """Push a group for every held lease; all are acknowledged when this returns."""
        by_shard: dict[int, list[Assign]] = defaultdict(list)
        for assign in self.held.values():
            by_shard[assign.shard].append(assign)
        parts = [
            (shard, held[n : n + AT_ONCE]) for shard, held in by_shard.items() for n in range(0, len(held), AT_ONCE)
        ]
        await asyncio.gather(*(self._push(self._shards[shard], part) for shard, part in parts))
        self.held.clear()

    async def _push(self, shard: Client, assigns: list[Assign]) -> None:
        items: list[PushItem] = []
        frames: list[memoryview] = []
        for a in assigns:
            specs, more = specs_and_frames(prf.payload(self._seed, a.group, a.lease, a.lineage, a.version))
            items.append(PushItem(group=a.group, lease=a.lease, worker=self._me, truncated=False, frames=specs))
            frames += more
        answer = await shard.ask(PushGroups(items=items), Results, frames, timeout_s=None)
        assert all(result.code is None for result in answer.results), answer.results[:3]
        self.pushed += len(assigns)

    def close(self) -> None:
        for client in (self._scheduler, *self._shards):
            client.close()


async def recovery(run_dir: Path, *, records: int) -> Recovery:
    """Fill a run with live groups; then kill each server that stores them."""
    patient = {"map_mb": 1024, "lease_s": 600.0}  # a machine with other load may be slow
    big: dict[str, dict[str, Any]] = {"trainer": {"batch_size": records + ROOM}, "scheduler": patient}
    async with Fleet(run_dir, **big, trajectories={"map_mb": 2048, "shards": 1}) as fleet:
        trainer, bulk = Trainer(run_dir, "trainer"), Bulk(fleet)
        joining = asyncio.ensure_future(trainer.run())
        try:
            await bulk.attach()
            started = time.monotonic()
            while bulk.pushed < records:
                await bulk.lease()
                await bulk.push()
            rate = bulk.pushed / (time.monotonic() - started)
            found, computed = dict[str, float](), dict[str, float]()
            for name in ("scheduler", *fleet.shards):
                while not bulk.held:
                    await bulk.lease()
                fleet.kill(name)
                began = time.monotonic()
                fleet.start(name)
                await fleet.answers(name)
                found[f"{name}: answers"] = time.monotonic() - began
                computed[f"{name}: answers"] = fleet.cpu_s(name)
                await bulk.push()  # waits for both: durable in the shard, registered with the scheduler
                found[f"{name}: acknowledges a push"] = time.monotonic() - began
                computed[f"{name}: acknowledges a push"] = fleet.cpu_s(name)
        finally:
            joining.cancel()
            await asyncio.gather(joining, return_exceptions=True)
            bulk.close()
            await trainer.close()
        return Recovery(records=bulk.pushed, restart_s=found, cpu_s=computed, pushes_per_s=rate)


class Waiting:
    """Rollout worker that waits for work."""

    def __init__(self, address: str, number: int) -> None:
        self._me = worker_id(f"waiting-{number}")
        self._client = Client(address, worker=self._me)
        self.heard_s = 0.0

    async def run(self) -> None:
        hello = Attach(worker=self._me, name=str(self._me), role="rollout", capacity=1)
        await self._client.ask(hello, AttachReply, timeout_s=None)
        while True:
            report = Report(worker=self._me, ack=0, held=[], stats=InstanceStats(), wait_ms=1000)
            await self._client.ask(report, Commands, timeout_s=None)
            self.heard_s = time.monotonic()

    def close(self) -> None:
        self._client.close()


async def storm(run_dir: Path, *, clients: int) -> Storm:
    """Kill a scheduler while clients wait at it, and probe its latency from a separate process all the time."""
    async with Fleet(run_dir) as fleet:
        waiting = [Waiting(fleet.where["scheduler"], number) for number in range(clients)]
        work = [asyncio.ensure_future(one.run()) for one in waiting]
        try:
            async with asyncio.timeout(60):
                while not all(one.heard_s for one in waiting):  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
            before = await _probe(fleet.where["scheduler"], QUIET_S)
            fleet.kill("scheduler")
            fleet.start("scheduler")
            await fleet.answers("scheduler")
            began = time.monotonic()
            during = asyncio.ensure_future(_probe(fleet.where["scheduler"], STORM_S))
            async with asyncio.timeout(60):
                while not all(one.heard_s > began for one in waiting):  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            back_s = max(one.heard_s for one in waiting) - began
            after = await during
        finally:
            for task in work:
                task.cancel()
            await asyncio.gather(*work, return_exceptions=True)
            for one in waiting:
                one.close()
    return Storm(
        back=sum(one.heard_s > began for one in waiting),
        back_s=back_s,
        before_p99_ms=_p99(before),
        after_p99_ms=_p99(after),
    )


async def _probe(address: str, seconds: float) -> list[float]:
    """Latencies in ms, measured by a separate process."""
    command = (sys.executable, "-m", "tests.process.reconnecting", address, str(seconds))
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    said, _ = await process.communicate()
    latencies: list[float] = json.loads(said)
    return latencies


def _p99(latencies: list[float]) -> float:
    return float(np.percentile(latencies, 99))


async def ask_again_and_again(address: str, seconds: float) -> list[float]:
    """Send many small requests; return the milliseconds each of them took."""
    client, latencies = Client(address, worker=worker_id("stranger")), list[float]()
    await client.ask(Operations(ops=[]), Results)
    deadline = time.monotonic() + seconds
    while (started := time.monotonic()) < deadline:
        await client.ask(Operations(ops=[]), Results)
        latencies.append((time.monotonic() - started) * 1000)
        await asyncio.sleep(PROBE_INTERVAL_S)
    client.close()
    return latencies


if __name__ == "__main__":
    print(json.dumps(uvloop.run(ask_again_and_again(sys.argv[1], float(sys.argv[2])))))
