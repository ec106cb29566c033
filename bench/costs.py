"""Measure what the parts of a run cost on this machine, and write the cost file of ``simulation.costs``.

    python -m bench.costs costs.toml
    staleflow simulate configs/skewed.toml simulation.costs=costs.toml simulation.model_gib=0.002

Servers are the real processes under load. Engine and trainer are the shipped ones, on the quickstart's model. All
values except those of checkpoints are CPU time, which other work on the machine hardly changes; on idle cores it is the
duration. Coefficients are non-negative least squares. Replace the values of links and disks with those of your own.
"""

import asyncio
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import msgspec
import numpy as np
import psutil
import uvloop
from scipy.optimize import nnls

from bench.control_load import Counts, Peer
from bench.control_plane import config_for, listening, loaded, serving
from bench.decisions import fleet
from bench.decisions import measure as decisions
from bench.progress import tracked
from bench.trajectories_measure import cpu_seconds, family
from bench.trajectories_own import GROUP, Shape, shard_cpu_s
from bench.weights_own import OwnPublisher, OwnReader
from staleflow.configs.costs import (
    CheckpointCosts,
    Costs,
    EngineCosts,
    LoadCosts,
    PublishCosts,
    PullCosts,
    RewardCosts,
    SchedulerCosts,
    ShardCosts,
    TrainerCosts,
    WireCosts,
)
from staleflow.configs.loading.load import addresses
from staleflow.configs.loading.toml import dumps
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
VERSIONS = (1 << 20, 256 << 20)
ROUNDS = 5
FRAME = 64 << 20


def fitted(rows: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """Return non-negative coefficients; each row has equal weight, whatever its value."""
    scale = 1.0 / np.maximum(np.array(values), 1e-12)
    coefficients, _ = nnls(np.array(rows) * scale[:, None], np.array(values) * scale)
    return [float(one) for one in coefficients]


# --- servers ---------------------------------------------------------------------------------------------------------


def scheduler(seconds: float) -> SchedulerCosts:
    """CPU of the real scheduler process under the load of ``bench.control_plane`` and under heartbeats alone."""
    rows: list[tuple[float, float]] = []
    cpu_s: list[float] = []
    for workers in WORKERS:
        config = config_for(workers, "process")
        with serving(config) as (run_dir, process):
            counts = uvloop.run(loaded(addresses(config, run_dir).scheduler, workers, seconds, process))
        rows.append((messages(counts, workers), counts.operations - counts.consumes - counts.reserves))
        cpu_s.append(counts.cpu_s)
    message_s, operation_s = fitted(rows, cpu_s)
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
        source=f"bench.control_plane with {', '.join(map(str, WORKERS))} workers, commits included in its messages; "
        f"decisions of {ENGINES} engines by bench.decisions, {DECISIONS_PER_S} a second",
        message_s=message_s,
        operation_s=operation_s,
        heartbeat_s=heartbeat_s(seconds),
        engine_s=DECISIONS_PER_S * decision_s / ENGINES,
    )


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
        for count in (200, ROUNDS):
            large = count == ROUNDS
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


# --- weights ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Moved:
    """CPU seconds of one version: published, verified by a reader, copied into its own tensors."""

    published: float
    pulled: float
    loaded: float


def moved(nbytes: int) -> Moved:
    """Publish and load versions of a size on this host; return means of the CPU seconds of all processes."""
    arrays = {"weights": np.random.default_rng(0).random(nbytes // 4, dtype=np.float32)}
    own = {name: np.empty_like(array) for name, array in arrays.items()}
    totals = np.zeros(3)
    with tempfile.TemporaryDirectory(prefix="sf-") as place:
        publisher, reader = OwnPublisher(place), OwnReader(place, 0)
        for turn in range(ROUNDS + 1):
            times = [cpu_s()]
            version = publisher.publish(arrays)
            times.append(cpu_s())
            reader.reach(version)
            views = reader.verified()
            times.append(cpu_s())
            for name, view in views.items():
                np.copyto(own[name], view)
            times.append(cpu_s())
            del views, view
            reader.release()
            totals += np.diff(times) if turn else 0.0  # the first touches new memory
        reader.close()
        publisher.close()
    published, pulled, loaded = (totals / ROUNDS).tolist()
    return Moved(published, pulled, loaded)


def cpu_s() -> float:
    """CPU seconds of this process and its children so far."""
    return time.process_time() + sum(cpu_seconds(family()).values())


def weights(network: WireCosts) -> tuple[PublishCosts, PullCosts, LoadCosts]:
    """Costs of a version on one host, and a network as fast as the wire."""
    small, large = (moved(nbytes) for nbytes in VERSIONS)
    span = (VERSIONS[1] - VERSIONS[0]) / GIB

    def line(first: float, second: float) -> dict[str, float]:
        gib_s = max(second - first, 0.0) / span
        return {"fixed_s": max(first - gib_s * VERSIONS[0] / GIB, 0.0), "gib_s": gib_s}

    sizes = " and ".join(str(one >> 20) for one in VERSIONS)
    source = f"the real parameter server, versions of {sizes} MiB, CPU time of all processes, mean of {ROUNDS}"
    return (
        PublishCosts(source=source, **line(small.published, large.published)),
        PullCosts(
            source=f"{source}; verified; the network is [wire]",
            network_gib_s=network.gib_s,
            **line(small.pulled, large.pulled),
        ),
        LoadCosts(source=f"{source}; one copy by one thread", **line(small.loaded, large.loaded)),
    )


def models() -> dict[str, Any]:
    """Tables of engine, trainer and checkpoint, from a process of its own."""
    command = [sys.executable, "-m", "bench.costs_models"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    tables: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return tables


def measured(seconds: float) -> Costs:
    """Measure everything."""
    steps = tracked("costs", ("models", "scheduler", "shard", "wire", "weights"))
    next(steps)
    tables = models()
    next(steps)
    scheduler_costs = scheduler(seconds)
    next(steps)
    shard_costs = shard(seconds)
    next(steps)
    wire_costs = uvloop.run(wire())
    next(steps)
    publish, pull, load = weights(wire_costs)
    model = "the shipped one on the quickstart's model, one thread, CPU time"
    machine = f"{os.cpu_count()} cores, load average {os.getloadavg()[0]:.0f}, nice {os.nice(0)}"
    return Costs(
        source=f"python -m bench.costs, {datetime.now(UTC):%Y-%m-%d}, {machine}",
        scheduler=scheduler_costs,
        shard=shard_costs,
        wire=wire_costs,
        publish=publish,
        pull=pull,
        load=load,
        engine=EngineCosts(source=f"transformers engine: {model}", **tables["engine"]),
        reward=RewardCosts(
            source="four messages; the function of the quickstart takes microseconds", fixed_s=4 * wire_costs.latency_s
        ),
        trainer=TrainerCosts(source=f"torch backend: {model}", **tables["trainer"]),
        checkpoint=CheckpointCosts(
            source="torch backend, written by the quickstart's model; a file of three times the weights, flushed",
            asynchronous=True,
            **tables["checkpoint"],
        ),
    )


def text(costs: Costs) -> str:
    """Return the cost file."""
    tables = msgspec.to_builtins(costs)
    return dumps({name: _short(value) for name, value in tables.items() if value is not None})


def _short(table: Any) -> Any:
    """Round to four digits: no measurement has more."""
    if isinstance(table, dict):
        return {name: _short(value) for name, value in table.items() if value != {}}
    return float(f"{table:.4g}") if isinstance(table, float) else table


@click.command(help=__doc__)
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--seconds", default=3.0, show_default=True, help="Measured seconds of each load of a server.")
def main(file: Path, seconds: float) -> None:
    multiprocessing.set_start_method("spawn")
    file.write_text(text(measured(seconds)), encoding="utf-8")


if __name__ == "__main__":
    main()
