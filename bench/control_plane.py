"""Measure how many lease operations a second one scheduler carries, beside a raw ZeroMQ echo of the same shape.

    python -m bench.control_plane                       1, 64 and 1,024 workers, both durabilities
    python -m bench.control_plane --workers 64 --seconds 10 --json

One operation is one group's reserve, push or occupy, or one batch's consume. The scheduler is the real process with its
store and trace; the load is one process with a socket per worker. Both share the machine's cores. The echo is a plain
blocking ROUTER loop that replies to messages of the same number and size without reading them.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import uvloop
from rich.console import Console
from rich.table import Table

from bench.control_echo import echo_load, serve_echo
from bench.control_load import Counts, Load
from bench.progress import tracked
from staleflow.configs.loading.load import addresses
from staleflow.configs.schema import Config, Coordination, Durability, Prompts, Reward, Scheduler, Staleness
from staleflow.configs.trainer import Trainer
from staleflow.servers.scheduler.main import serve

MAX_STALENESS = 2
WARM_UP_S = 2.0


@dataclass
class Row:
    """One line of the table."""

    what: str
    workers: int
    batch_size: int
    operations_per_s: float
    p50_ms: float
    p99_ms: float
    cpu_us: float
    """CPU time of the server per operation: the limit on a machine without other load."""
    share_of_echo: float = 1.0


def shape(workers: int) -> tuple[int, int]:
    """Batch size and worker capacity: a window that keeps every worker busy, with steps of a quarter second or more."""
    batch_size = max(256, 2 * workers)
    return batch_size, max(8, -(-batch_size * (MAX_STALENESS + 1) // workers))


def config_for(workers: int, durability: Durability) -> Config:
    """Configuration of a run of this shape; only its scheduler is started."""
    batch_size, _ = shape(workers)
    return Config(
        prompts=Prompts(source="bench:prompts"),
        reward=Reward(run="bench:reward"),
        staleness=Staleness(max_staleness=MAX_STALENESS),
        coordination=Coordination(routing="least_loaded", admission="fill"),
        trainer=Trainer(batch_size=batch_size, steps=1_000_000),
        scheduler=Scheduler(durability=durability, map_mb=4096),
    )


@contextmanager
def serving(config: Config) -> Generator[tuple[Path, psutil.Process]]:
    """Start a scheduler in a run directory of its own; stop it at the end."""
    with tempfile.TemporaryDirectory(prefix="staleflow-bench-") as folder:
        process = multiprocessing.get_context("spawn").Process(target=_serve, args=(config, Path(folder)))
        process.start()
        try:
            yield Path(folder), psutil.Process(process.pid)
        finally:
            process.terminate()
            process.join(30)


def measure(workers: int, durability: Durability, seconds: float) -> Counts:
    """Start a scheduler, load it, stop it."""
    config = config_for(workers, durability)
    with serving(config) as (run_dir, process):
        return uvloop.run(loaded(addresses(config, run_dir).scheduler, workers, seconds, process))


def _serve(config: Config, run_dir: Path) -> None:
    raise SystemExit(serve(config, run_dir))


async def loaded(
    address: str,
    workers: int,
    seconds: float,
    server: psutil.Process,
    *,
    capacity: int = 0,
    commits: Callable[[], int] = lambda: 0,
) -> Counts:
    """Load the scheduler at ``address``. ``capacity``: of each worker; 0: that of ``shape``."""
    await listening(address)
    load = Load(address, workers=workers, capacity=capacity or shape(workers)[1])
    failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def on_error(_: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        error = context.get("exception")
        if not failure.done() and isinstance(error, Exception):
            failure.set_exception(error)

    asyncio.get_running_loop().set_exception_handler(on_error)
    running = asyncio.ensure_future(load.run(WARM_UP_S, seconds, server, commits))
    try:
        await asyncio.wait((running, failure), return_when=asyncio.FIRST_COMPLETED)
        if failure.done():
            failure.result()
        return running.result()
    finally:
        running.cancel()
        load.close()


async def listening(address: str) -> None:
    """Wait until the scheduler listens."""
    path = address.removeprefix("ipc://")
    deadline = time.monotonic() + 30
    while not os.path.exists(path):  # noqa: ASYNC240 - a look at a socket file
        if time.monotonic() > deadline:
            raise TimeoutError(f"no scheduler at {address}")
        await asyncio.sleep(0.02)


def measure_echo(workers: int, seconds: float) -> Counts:
    """Send the same messages to a server that does not read them."""
    with tempfile.TemporaryDirectory(prefix="staleflow-bench-") as folder:
        address = f"ipc://{folder}/echo"
        process = multiprocessing.get_context("spawn").Process(target=serve_echo, args=(address,), daemon=True)
        process.start()
        try:
            return uvloop.run(_echoed(address, workers, seconds, psutil.Process(process.pid)))
        finally:
            process.terminate()
            process.join(30)


async def _echoed(address: str, workers: int, seconds: float, server: psutil.Process) -> Counts:
    await listening(address)
    return await echo_load(address, workers=workers, seconds=seconds, warm_up_s=0.5, server=server)


def rows_for(workers: int, seconds: float) -> list[Row]:
    """Measure echo, process and power at one number of workers."""
    batch_size, _ = shape(workers)
    echo = measure_echo(workers, min(seconds, 3.0))
    rows = [
        Row("raw echo", workers, batch_size, echo.per_second, echo.latency_ms(0.5), echo.latency_ms(0.99), echo.cpu_us)
    ]
    for durability in ("process", "power"):
        counts = measure(workers, durability, seconds)
        rows.append(
            Row(
                f'scheduler, "{durability}"',
                workers,
                batch_size,
                counts.per_second,
                counts.latency_ms(0.5),
                counts.latency_ms(0.99),
                counts.cpu_us,
                counts.per_second / echo.per_second,
            )
        )
    return rows


HEAD = ("", "workers", "groups a batch", "operations/s", "p50 ms", "p99 ms", "CPU µs/op", "of the echo")


def cells(row: Row) -> tuple[str, ...]:
    return (
        row.what,
        f"{row.workers:,}",
        f"{row.batch_size:,}",
        f"{row.operations_per_s:,.0f}",
        f"{row.p50_ms:.2f}",
        f"{row.p99_ms:.2f}",
        f"{row.cpu_us:.1f}",
        f"{row.share_of_echo:.1%}",
    )


def markdown(rows: list[Row]) -> str:
    """The table for ``bench/results``."""
    lines = [HEAD, ("---", *("---:" for _ in HEAD[1:])), *(cells(row) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def show(rows: list[Row]) -> None:
    table = Table(title=f"Lease operations, {os.cpu_count()} cores shared with the load")
    for head in HEAD:
        table.add_column(head, justify="left" if not head else "right")
    for row in rows:
        table.add_row(*cells(row))
    Console(width=max(Console().width, 100)).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 64, 1024])
    parser.add_argument("--seconds", type=float, default=5.0, help="measured, after a warm-up")
    parser.add_argument("--json", action="store_true", help="one JSON array instead of the table")
    parser.add_argument("--markdown", action="store_true", help="a table for bench/results")
    arguments = parser.parse_args()
    rows = [row for workers in tracked("workers", arguments.workers) for row in rows_for(workers, arguments.seconds)]
    if arguments.json:
        print(json.dumps([vars(row) for row in rows]))
    elif arguments.markdown:
        print(markdown(rows))
    else:
        show(rows)


if __name__ == "__main__":
    main()
