"""Measurements of every contender of ``bench.trajectories``: counts, CPU and memory of a whole tree of processes.

The module imports no part of the product, so that a peer may run in an environment of its own.
"""

import contextlib
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field

import psutil

TRAJECTORY_BYTES = 20 * 1024
PUT = 16
"""Trajectories of one put."""
TAKE = 256
"""Trajectories that the consumer takes at once."""
PRODUCERS = 2
START_S = 150.0
"""A contender that has carried no trajectory by then is skipped."""
IN_FLIGHT = 3 * TAKE
"""Trajectories that may be between the producers and the consumer."""


@dataclass(kw_only=True)
class Row:
    """One contender in one round; -1 marks values that were not measured."""

    what: str
    per_s: float = -1.0
    """Trajectories a second that reach the consumer."""
    cpu_s: float = -1.0
    """CPU seconds of all processes for 1,000 trajectories."""
    memory_mb: float = -1.0
    """Proportional share of all processes at the end, files that they map included."""
    p50_ms: float = -1.0
    """From before one put of 16 until the consumer has them, without other traffic."""
    skipped: str = ""
    extra: dict[str, float] = field(default_factory=dict[str, float])

    def line(self) -> str:
        """The row as one line for a pipe."""
        return json.dumps(asdict(self))


def row_of(line: str) -> Row:
    """The row that ``line`` wrote."""
    return Row(**json.loads(line))


def median(rows: Sequence[Row]) -> Row:
    """Medians of the rounds of one contender, column by column."""
    good = [row for row in rows if not row.skipped]
    if not good:
        return rows[0]

    def middle(value: Callable[[Row], float]) -> float:
        result = [value(row) for row in good if value(row) >= 0]
        return statistics.median(result) if result else -1.0

    names = dict.fromkeys(name for row in good for name in row.extra)
    extra = {name: statistics.median(row.extra[name] for row in good if name in row.extra) for name in names}
    return Row(
        what=good[0].what,
        per_s=middle(lambda row: row.per_s),
        cpu_s=middle(lambda row: row.cpu_s),
        memory_mb=middle(lambda row: row.memory_mb),
        p50_ms=middle(lambda row: row.p50_ms),
        extra=extra,
    )


def family() -> list[psutil.Process]:
    """This process's descendants: all processes of a contender. This process only measures."""
    result: list[psutil.Process] = psutil.Process().children(recursive=True)
    return result


def cpu_seconds(processes: Sequence[psutil.Process]) -> dict[int, float]:
    """CPU time that each process has used."""
    result: dict[int, float] = {}
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            result[process.pid] = float(times.user + times.system)
    return result


def memory_mb() -> float:
    """Proportional set size of all processes."""
    total = 0
    for process in family():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            total += process.memory_full_info().pss
    return total / 1e6


def watch(row: Row, taken: Callable[[], int], *, warm_up_s: float, seconds: float) -> Row:
    """Fill ``row`` from ``seconds`` of work after the warm-up; ``taken`` counts trajectories."""
    limit = time.monotonic() + START_S
    while taken() < 2 * TAKE:
        if time.monotonic() > limit:
            raise TimeoutError(f"{row.what}: nothing comes")
        time.sleep(0.05)
    time.sleep(warm_up_s)
    processes = family()
    before, count, started = cpu_seconds(processes), taken(), time.perf_counter()
    time.sleep(seconds)
    took, count = time.perf_counter() - started, taken() - count
    after = cpu_seconds(processes)
    used = sum(seconds - before.get(pid, 0.0) for pid, seconds in after.items())
    row.per_s, row.cpu_s = count / took, 1000 * used / max(count, 1)
    row.memory_mb = memory_mb()
    return row
