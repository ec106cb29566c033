"""Costs of scheduler, trajectory server and wire for ``bench.costs``: the real processes under load."""

import asyncio
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path

import lmdb
import psutil
import uvloop

from bench.control_load import Counts, Peer
from bench.control_plane import config_for, listening, loaded, serving
from bench.costs_fit import fitted
from bench.decisions import fleet
from bench.decisions import measure as decisions
from bench.trajectories_own import GROUP, Shape, shard_cpu_s
from staleflow.configs.costs import SchedulerCosts, ShardCosts, WireCosts
from staleflow.configs.loading.load import addresses
from staleflow.net.client import Client
from staleflow.net.endpoint import Call, Endpoint
from staleflow.protocols.consistency.ids import WorkerId
from staleflow.protocols.coordination.decide import Strategies
from staleflow.protocols.wire.messages import Done, GetStatus, Ping, Reply

GIB = 1 << 30
WORKERS = (4, 64, 256)
SHARD_TOKENS = (200, 20_000)
TOKEN_BYTES = 9
"""A token of a trajectory: an id, a log-probability and a mask byte."""
DECISIONS_PER_S = 4
"""Coordination cycles in each second of a busy run; their pauses allow more."""
ENGINES = 256
FRAME = 64 << 20
ROUND_TRIPS, LARGE_ROUND_TRIPS = 200, 5


def scheduler(seconds: float) -> SchedulerCosts:
    """CPU of the real scheduler process under the load of ``bench.control_plane`` and under heartbeats alone."""
    rows: list[tuple[float, float, float]] = []
    cpu_s: list[float] = []
    for workers, capacity in ((1, 1), *((workers, 0) for workers in WORKERS)):
        config = config_for(workers, "process")
        with serving(config) as (run_dir, process):
            address, commits = addresses(config, run_dir).scheduler, partial(transactions, run_dir)
            counts = uvloop.run(loaded(address, workers, seconds, process, capacity=capacity, commits=commits))
        operations = counts.operations - counts.consumes - counts.reserves
        rows.append((counts.commits, messages(counts, workers), operations))
        cpu_s.append(counts.cpu_s)
    drain_s, message_s, operation_s = fitted(rows, cpu_s)
    strategies = Strategies(
        routing="cost_model",
        min_gain=0.0,
        sync="greedy",
        sync_threshold=8,
        migration="none",
        migration_gap=2.0,
        admission="just_in_time",
    )
    decision_s = statistics.median(decisions(fleet(ENGINES), strategies, 30)) / 1000
    return SchedulerCosts(
        source=f"bench.control_plane with {', '.join(map(str, WORKERS))} workers, and with one that has one group at a "
        f"time; decisions of {ENGINES} engines by bench.decisions, {DECISIONS_PER_S} a second",
        drain_s=drain_s,
        message_s=message_s,
        operation_s=operation_s,
        heartbeat_s=heartbeat_s(seconds),
        engine_s=DECISIONS_PER_S * decision_s / ENGINES,
    )


def transactions(run_dir: Path) -> int:
    """Return the number of transactions that the scheduler of a run has committed."""
    with lmdb.open(str(run_dir / "scheduler"), readonly=True, lock=False) as store:
        return int(store.info()["last_txnid"])


def messages(counts: Counts, workers: int) -> float:
    """Number of messages of a load: reports, operations, versions, and a report of each worker that loaded one."""
    return counts.reports + len(counts.latencies_s) + counts.consumes * (1 + workers)


def heartbeat_s(seconds: float) -> float:
    """CPU of the real scheduler for each heartbeat, without other work."""
    config = config_for(1, "process")

    async def load(address: str, process: psutil.Process) -> float:
        await listening(address)
        peers, sent = [Peer(address, f"monitor-{number}") for number in range(16)], 0
        stop = False

        def ping(peer: Peer) -> None:
            nonlocal sent
            sent += 1

            def replied(_: Reply, __: float) -> None:
                if not stop:
                    ping(peer)

            peer.ask(Ping(), replied)

        for peer in peers:
            ping(peer)
        await asyncio.sleep(1.0)
        before, count = process.cpu_times(), sent
        await asyncio.sleep(seconds)
        after, stop = process.cpu_times(), True
        used = after.user + after.system - before.user - before.system
        for peer in peers:
            peer.socket.close(linger_ms=0)
        return float(used) / max(sent - count, 1)

    with serving(config) as (run_dir, process):
        return uvloop.run(load(addresses(config, run_dir).scheduler, process))


def shard(seconds: float) -> ShardCosts:
    """CPU of the real trajectory server with small and large groups, which workers and trainer map."""
    shapes = [Shape(name=f"{tokens} tokens", tokens=tokens, producers=1) for tokens in SHARD_TOKENS]
    each_s = [shard_cpu_s(shape, warm_up_s=0.5, seconds=seconds) for shape in shapes]
    gib = [GROUP * tokens * TOKEN_BYTES / GIB for tokens in SHARD_TOKENS]
    group_s, gib_s = fitted([(1.0, size) for size in gib], each_s)
    source = (
        f"bench.trajectories_own, groups of {GROUP} trajectories of {' and '.join(map(str, SHARD_TOKENS))} tokens; "
    )
    return ShardCosts(source=f"{source}fetching included", push_group_s=group_s, push_gib_s=gib_s)


async def wire() -> WireCosts:
    """Round trips on loopback, and a reply with a large frame: client and server share one loop."""
    frame = bytes(FRAME)

    def on_call(call: Call) -> None:
        call.reply(Done(), [memoryview(frame)] if large else [])

    large, times = False, list[float]()
    with tempfile.TemporaryDirectory() as folder:
        address = f"ipc://{folder}/server"
        serving = asyncio.ensure_future(Endpoint(address, on_call=on_call).serve())
        client = Client(address, worker=WorkerId("rollout-0.1"))
        for count in (ROUND_TRIPS, LARGE_ROUND_TRIPS):
            large = count == LARGE_ROUND_TRIPS
            took: list[float] = []
            for _ in range(count):
                started = time.process_time()
                await client.call(GetStatus())  # endpoints reply to a Ping by themselves
                took.append(time.process_time() - started)
            times.append(min(took))
        client.close()
        serving.cancel()
    source = "a client and an endpoint on one loop, ipc: CPU time of the best round trip"
    return WireCosts(source=source, latency_s=times[0] / 2, gib_s=(times[1] - times[0]) * GIB / FRAME)
