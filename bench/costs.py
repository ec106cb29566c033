"""Measure what the parts of a run cost on this machine, and write the cost file of ``simulation.costs``.

    python -m bench.costs costs.toml
    staleflow simulate configs/skewed.toml simulation.costs=costs.toml simulation.model_gib=0.002

Servers are the real processes under load. Engine and trainer are the shipped ones, on the quickstart's model. All
values except those of checkpoints are CPU time; on idle cores it is the duration. Other work on the machine adds no
waiting to it, but cold caches and shared cores do add: at a load of 15 on two cores it was up to twice that at a load
of 3. Coefficients are non-negative least squares. Replace the values of links and disks with those of your own.
"""

import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import click
import msgspec
import numpy as np
import uvloop

from bench.costs_servers import scheduler, shard, wire
from bench.progress import tracked
from bench.trajectories_measure import cpu_seconds, family
from bench.weights_own import OwnPublisher, OwnReader
from staleflow.configs.costs import (
    CheckpointCosts,
    Costs,
    EngineCosts,
    LoadCosts,
    PublishCosts,
    PullCosts,
    RewardCosts,
    TrainerCosts,
    WireCosts,
)
from staleflow.configs.loading.toml import dumps

GIB = 1 << 30
VERSIONS = (1 << 20, 256 << 20)
ROUNDS = 5


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
            for name in own:
                np.copyto(own[name], views[name])
            times.append(cpu_s())
            del views
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
            source="the quickstart's function in its process, CPU time; four messages",
            fixed_s=4 * wire_costs.latency_s,
            **tables["reward"],
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
        items = cast(dict[str, Any], table).items()
        return {name: _short(value) for name, value in items if value != {}}
    return float(f"{table:.4g}") if isinstance(table, float) else table


@click.command(help=__doc__)
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--seconds", default=3.0, show_default=True, help="Measured seconds of each load of a server.")
def main(file: Path, seconds: float) -> None:
    multiprocessing.set_start_method("spawn")
    file.write_text(text(measured(seconds)), encoding="utf-8")


if __name__ == "__main__":
    main()
