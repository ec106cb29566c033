"""Measure whether the servers' memory, file descriptors and stores stay flat while trajectories pass through them.

    python -m bench.flat                                 200,000 trajectories, as ``make test`` does
    python -m bench.flat --trajectories 1000000          the long one

A scheduler, one trajectory server and the parameter server run as processes of their own; ``flat_load`` plays all other
roles. After a warm-up of a quarter, the maximum of the last quarter is compared with the maximum of the second. The
trace and the metrics are logs and grow by design: their bytes a trajectory are printed beside it. Exit 1 when any other
resource grows.
"""

import argparse
import asyncio
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from bench.disk import bytes_of
from bench.flat_load import BATCH, GROUP_SIZE, Load, config_of

SERVERS = ("scheduler", "trajectories-0", "parameters")
LOGS = ("trace.jsonl", "metrics.jsonl", "logs")
ROOM = {"memory": (1.10, 4 << 20), "files": (1.0, 2), "store": (1.25, 8 << 20)}
"""Maximum growth of a resource: a factor, and an additional amount (bytes, descriptors). A store's file needs room for
the data that arrives between two queries for removable data, which are two seconds apart; ten times that amount passes
through it."""
_PROCESS = """
import sys
from pathlib import Path
from staleflow.configs.loading.load import read_run
from staleflow.servers.{role}.main import serve
sys.exit(serve(read_run(Path(sys.argv[1])), Path(sys.argv[1]){shard}))
"""


@dataclass(slots=True)
class Seen:
    """Resources that one server held, sample after sample."""

    memory: list[int] = field(default_factory=list[int])
    files: list[int] = field(default_factory=list[int])
    store: list[int] = field(default_factory=list[int])

    def of(self, resource: str) -> tuple[int, int]:
        """The maximum of the second quarter and of the last."""
        values: list[int] = getattr(self, resource)
        quarter = max(len(values) // 4, 1)
        return max(values[quarter : 2 * quarter]), max(values[-quarter:])

    def grown(self) -> list[str]:
        """Resources that are not flat."""
        result: list[str] = []
        for resource, (factor, amount) in ROOM.items():
            before, after = self.of(resource)
            if after > before * factor + amount:
                result.append(f"{resource} grew from {before} to {after}")
        return result


@dataclass(slots=True)
class Flat:
    """The outcome."""

    trajectories: int
    seconds: float
    log_bytes: int
    servers: dict[str, Seen]

    def grown(self) -> dict[str, list[str]]:
        """Resources that are not flat, by server."""
        return {name: result for name, observed in self.servers.items() if (result := observed.grown())}


def measure(run_dir: Path, trajectories: int) -> Flat:
    """Send that many trajectories through fresh servers."""
    steps = -(-trajectories // (BATCH * GROUP_SIZE))
    config = config_of(run_dir, steps)
    processes = {name: _started(name, run_dir) for name in SERVERS}
    servers = {name: Seen() for name in SERVERS}
    watched = {name: psutil.Process(process.pid) for name, process in processes.items()}

    def look(_: int) -> None:
        for name, observed in servers.items():
            observed.memory.append(watched[name].memory_info().rss)
            observed.files.append(watched[name].num_fds())
            observed.store.append(bytes_of(run_dir / name))

    started = time.perf_counter()
    try:
        load = Load(config, run_dir, look)
        asyncio.run(load.run(lambda: next((n for n, process in processes.items() if process.poll() is not None), "")))
    finally:
        for process in processes.values():
            process.terminate()
        codes = {name: process.wait(30) for name, process in processes.items()}
    if any(codes.values()):
        raise RuntimeError(f"servers ended with {codes}")
    logs = sum(bytes_of(run_dir / name) for name in LOGS)
    return Flat(load.trained, time.perf_counter() - started, logs, servers)


def _started(name: str, run_dir: Path) -> "subprocess.Popen[bytes]":
    role, _, shard = name.partition("-")
    code = _PROCESS.format(role=role, shard=f", {shard}" if shard else "")
    return subprocess.Popen([sys.executable, "-c", code, str(run_dir)], stderr=subprocess.DEVNULL)


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=int, default=200_000)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="sf-") as folder:
        flat = measure(Path(folder) / "run", asked.trajectories)
    table = Table("server", *(f"{resource}, {when}" for resource in ROOM for when in ("second quarter", "last")))
    for name, observed in flat.servers.items():
        cells = [f"{value:,}" for resource in ROOM for value in observed.of(resource)]
        table.add_row(name, *cells)
    console = Console(width=140)
    console.print(table)
    rate, each = flat.trajectories / flat.seconds, flat.log_bytes / flat.trajectories
    console.print(
        f"{flat.trajectories:,} trajectories in {flat.seconds:,.0f} s ({rate:,.0f}/s); logs {each:.0f} bytes each"
    )
    grown = flat.grown()
    for name, result in grown.items():
        console.print(f"{name}: {'; '.join(result)}")
    sys.exit(1 if grown else 0)


if __name__ == "__main__":
    main()
