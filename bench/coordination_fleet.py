"""Measure 8 to 1,024 engines at the same work for each, and the time of one decision on the snapshots of such a run."""

import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from heapq import heappush, heappushpop
from unittest.mock import patch

from bench.coordination_table import Line, Table
from bench.coordination_world import DISPATCH, Job, Publish, Size, run, world
from staleflow.protocols.coordination.decide import Strategies, decide
from staleflow.protocols.coordination.view import Order, Snapshot
from staleflow.servers.scheduler.coordination import cycle

KEPT, AGAIN = 20, 5
"""Number of the slowest decisions that are repeated, and repetitions of each, in CPU time of their thread: other load
of the machine does not count."""
MAX_MS = 5.0
ETA = 2


class Stopwatch:
    """Stands in for ``decide``, and keeps the slowest decisions."""

    def __init__(self) -> None:
        self.ms: list[float] = []
        self._slowest: list[tuple[float, int, Snapshot, Strategies]] = []

    def decide(self, snapshot: Snapshot, strategies: Strategies) -> list[Order]:
        started = time.perf_counter()
        orders = decide(snapshot, strategies)
        took_ms = 1000 * (time.perf_counter() - started)
        self.ms.append(took_ms)
        one = (took_ms, len(self.ms), snapshot, strategies)
        if len(self._slowest) < KEPT:
            heappush(self._slowest, one)
        else:
            heappushpop(self._slowest, one)
        return orders

    def worst_ms(self) -> float:
        """The slowest of the repeated decisions, each with its best time."""
        return max(min(_took_ms(*one[2:]) for _ in range(AGAIN)) for one in self._slowest)


def _took_ms(snapshot: Snapshot, strategies: Strategies) -> float:
    started = time.thread_time()
    decide(snapshot, strategies)
    return 1000 * (time.thread_time() - started)


@contextmanager
def timed() -> Generator[Stopwatch]:
    """Time the decision of every cycle."""
    watch = Stopwatch()
    with patch.object(cycle, "decide", watch.decide):
        yield watch


def engines(size: Size, cost: str, publish: Publish) -> Table:
    """Under the token bound: the longest group of a larger batch is longer, which is unrelated to scale."""
    lines: list[Line] = []
    first = 0.0
    for count in size.fleets:
        batch = size.batch // size.engines * count
        shape = (f"rollout.workers={count}", f"trainer.batch_size={batch}", f"trainer.steps={4 * ETA + 4}")
        config = world(size, cost, publish, "staleness.bound=token", *DISPATCH, *shape, eta=ETA)
        with timed() as watch:
            result = run(Job(config))
        groups_per_min = result.steps_per_min * batch / count
        first = first or groups_per_min
        lines.append(_line(count, groups_per_min, groups_per_min / first, watch, count == max(size.fleets)))
    early = publish == "start"
    when = "with the batch of its step" if early else "after its step"
    return Table(
        title=f"Engines at fixed work for each, token bound, η {ETA}; a version is out {when}",
        lines=lines,
        judged=early and size.full,
    )


def _line(count: int, groups_per_min: float, share: float, watch: Stopwatch, judged: bool) -> Line:
    p50, p99, worst = _at(watch.ms, 0.5), _at(watch.ms, 0.99), watch.worst_ms()
    return Line(
        what=f"{count:,} engines",
        target=f"≥ 0.9 linear, decide() < {MAX_MS:g} ms" if judged else "",
        measured=f"{groups_per_min:.2f} groups/min an engine = {share:.3f} linear; {len(watch.ms):,} decisions: "
        f"median {p50:.2f} ms, p99 {p99:.2f} ms; the slowest {KEPT} again, best of {AGAIN}: {worst:.2f} ms at most",
        bound="1.000 linear",
        met=share >= 0.9 and worst < MAX_MS if judged else None,
        values={"share": share, "worst_ms": worst},
    )


def _at(values: Sequence[float], place: float) -> float:
    return sorted(values)[int(place * (len(values) - 1))]
