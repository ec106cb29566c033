"""Trajectories to a consumer: this service beside queues, Redis, Ray, TransferQueue and Reverb, interleaved in one run.

    python -m bench.trajectories                                    three rounds of each, a table
    python -m bench.trajectories --peers-python .venv-peers/bin/python --rounds 5 --markdown

Trajectories of 20 KB in groups of eight, two producers that put 16 at a time, one consumer that takes 256. The service
keeps all its promises meanwhile: leases, the bound, seals, checksums, a store that outlives ``kill -9``. Peers do none
of that. Every contender runs in processes of its own, all of them once a round; the output is the medians of the
rounds. The raw store is LMDB's own group commit of the same bytes.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial

import lmdb
from rich.console import Console
from rich.table import Table

from bench.trajectories_measure import TRAJECTORY_BYTES, Row, median, row_of
from bench.trajectories_own import GROUP, Shape, latency, measured, waiting

OWN = (
    Shape(name="staleflow, mapped"),
    Shape(name="staleflow, frames, ipc", shared=False),
    Shape(name="staleflow, frames, tcp", shared=False, tcp=True),
    Shape(name="staleflow, mapped, power", durability="power"),
    Shape(name="staleflow, frames, power", shared=False, durability="power"),
)
TWO_SHARDS = Shape(name="staleflow, mapped, 2 shards", shards=2)
PEERS = (
    "multiprocessing queue, one a put",
    "multiprocessing queue, 16 a put",
    "Redis list, unix",
    "Redis list, tcp",
    "Ray queue",
    "Ray queue of references",
    "TransferQueue, 16 a put",
    "TransferQueue, 256 a put",
    "TransferQueue, one a put",
    "Reverb",
)
COMMIT = 32
"""Groups of one transaction of the raw store."""
HEAD = ("", "trajectories/s", "CPU s per 1,000", "memory MB", "p50 ms", "layout ms", "wait %")


def own(shape: Shape, seconds: float) -> Row:
    """The service in one shape."""
    row = measured(shape, warm_up_s=1.0, seconds=seconds)
    row.p50_ms = latency(shape, seconds=min(seconds, 2.0))
    if shape in OWN[:3]:
        row.extra["wait"] = 100 * waiting(shape, seconds=seconds)
    return row


def peer(name: str, pythons: list[str], seconds: float) -> Row:
    """A peer in the first environment that has it; otherwise a row with the reason why it was skipped."""
    row = Row(what=name)
    for python in pythons:
        command = [python, "-m", "bench.trajectories_peers", name, "--seconds", str(seconds)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        if ended.returncode:
            return Row(what=name, skipped=ended.stderr.strip().splitlines()[-1][:200])
        row = row_of(ended.stdout.strip().splitlines()[-1])
        if not row.skipped:
            return row
    return row


def raw_store(seconds: float, *, sync: bool) -> Row:
    """LMDB alone: groups of the same bytes, committed 32 at a time."""
    blobs = [os.urandom(GROUP * TRAJECTORY_BYTES) for _ in range(COMMIT)]
    with tempfile.TemporaryDirectory(prefix="sf-") as folder:
        env = lmdb.open(folder, map_size=4 << 30, sync=sync, metasync=sync)
        count, started, cpu_s = 0, time.perf_counter(), time.process_time()
        while time.perf_counter() < started + seconds:
            with env.begin(write=True) as txn:
                for place, blob in enumerate(blobs):
                    txn.put(((count + place) % 2048).to_bytes(8, "big"), blob)
            count += COMMIT
        took, used = time.perf_counter() - started, time.process_time() - cpu_s
        env.close()
    done = count * GROUP
    name = f"LMDB alone, {'power' if sync else 'process'}"
    return Row(what=name, per_s=done / took, cpu_s=1000 * used / done)


def rounds(contenders: dict[str, Callable[[], Row]], count: int, tell: Callable[[str], None]) -> list[Row]:
    """The median of each; contenders skipped in the first round are not tried again."""
    result: dict[str, list[Row]] = {name: [] for name in contenders}
    for number in range(count):
        for name, measure in contenders.items():
            if result[name] and result[name][0].skipped:
                continue
            row = measure()
            result[name].append(row)
            load = os.getloadavg()[0]
            tell(f"round {number + 1}: {name}: {row.skipped or f'{row.per_s:,.0f}/s'} (load {load:.1f})")
    return [median(rows) for rows in result.values()]


def cells(row: Row) -> tuple[str, ...]:
    """A line of the table."""

    def number(value: float, form: str) -> str:
        return format(value, form) if value >= 0 else "-"

    return (
        row.what,
        f"skipped: {row.skipped}" if row.skipped else number(row.per_s, ",.0f"),
        number(row.cpu_s, ".3f"),
        number(row.memory_mb, ",.0f"),
        number(row.p50_ms, ".2f"),
        number(row.extra.get("assemble_ms", -1.0), ".1f"),
        number(row.extra.get("wait", -1.0), ".1f"),
    )


RATIOS = (
    ("frames, ipc / Redis unix", "staleflow, frames, ipc", "Redis list, unix", 1.2),
    ("frames, tcp / Redis tcp", "staleflow, frames, tcp", "Redis list, tcp", 1.2),
    ("frames, ipc / queue, one a put", "staleflow, frames, ipc", "multiprocessing queue, one a put", 1.0),
    ("mapped / frames, ipc", "staleflow, mapped", "staleflow, frames, ipc", 1.5),
    ("frames, ipc / Ray queue", "staleflow, frames, ipc", "Ray queue", 4.0),
    ("frames, ipc / TransferQueue, 16 a put", "staleflow, frames, ipc", "TransferQueue, 16 a put", 8.0),
    ("frames, ipc / TransferQueue, 256 a put", "staleflow, frames, ipc", "TransferQueue, 256 a put", 5.0),
    ("frames, ipc / TransferQueue, one a put", "staleflow, frames, ipc", "TransferQueue, one a put", 25.0),
    ("frames, ipc / Reverb", "staleflow, frames, ipc", "Reverb", 5.0),
    ("mapped, power / LMDB alone, power", "staleflow, mapped, power", "LMDB alone, power", 0.7),
    ("frames, power / LMDB alone, power", "staleflow, frames, power", "LMDB alone, power", 0.7),
    ("2 shards / 1, mapped", "staleflow, mapped, 2 shards", "staleflow, mapped", 1.8),
)
"""Label, contender, reference, and goal for the ratio of their trajectories a second."""
DELAYS = (
    ("p50 of frames, ipc / Redis unix", "staleflow, frames, ipc", "Redis list, unix", 1.5),
    ("p50 of frames, tcp / Redis tcp", "staleflow, frames, tcp", "Redis list, tcp", 1.5),
)
COSTS = (
    ("CPU s per 1,000, mapped", "staleflow, mapped", 0.09),
    ("CPU s per 1,000, frames, ipc", "staleflow, frames, ipc", 0.14),
)


def goals(rows: list[Row]) -> list[tuple[str, str, str]]:
    """Label, measured value and goal of each comparison whose contenders were measured."""
    of = {row.what: row for row in rows if not row.skipped}
    result = [
        (what, f"{of[one].per_s / of[other].per_s:.2f}", f">= {goal}")
        for what, one, other, goal in RATIOS
        if one in of and other in of
    ]
    result += [
        (what, f"{of[one].p50_ms / of[other].p50_ms:.2f}", f"<= {goal}")
        for what, one, other, goal in DELAYS
        if one in of and other in of
    ]
    result += [(what, f"{of[one].cpu_s:.3f}", f"<= {goal}") for what, one, goal in COSTS if one in of]
    waits = [(row.what, row.extra["wait"]) for row in of.values() if "wait" in row.extra]
    return result + [(f"trainer's wait, % of its time, {what}", f"{wait:.1f}", "<= 1") for what, wait in waits]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each measurement, after a warm-up")
    parser.add_argument(
        "--peers-python", nargs="+", default=[sys.executable], help="of environments that have the peers"
    )
    parser.add_argument("--only", nargs="+", default=[], help="contenders whose names contain one of these")
    parser.add_argument("--markdown", action="store_true", help="tables for bench/results")
    asked = parser.parse_args()
    seconds: float = asked.seconds
    contenders: dict[str, Callable[[], Row]] = {}
    for shape in (*OWN, TWO_SHARDS):
        contenders[shape.name] = partial(own, shape, seconds)
    for name in PEERS:
        contenders[name] = partial(peer, name, asked.peers_python, seconds)
    for sync in (False, True):
        contenders[f"LMDB alone, {'power' if sync else 'process'}"] = partial(raw_store, seconds, sync=sync)
    if asked.only:
        contenders = {name: run for name, run in contenders.items() if any(word in name for word in asked.only)}
    console = Console(width=140)
    rows = rounds(contenders, asked.rounds, lambda line: console.print(line, style="dim"))
    if asked.markdown:
        lines = [HEAD, ("---", *("---:" for _ in HEAD[1:])), *(cells(row) for row in rows)]
        print("\n".join(f"| {' | '.join(line)} |" for line in lines))
        print("\n".join(("", "| | found | goal |", "| --- | ---: | ---: |")))
        print("\n".join(f"| {' | '.join(line)} |" for line in goals(rows)))
        return
    table = Table(title=f"20 KB trajectories, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    for head in HEAD:
        table.add_column(head, justify="left" if not head else "right")
    for row in rows:
        table.add_row(*cells(row))
    console.print(table)
    for line in goals(rows):
        console.print(*line, sep="   ")


if __name__ == "__main__":
    main()
