"""Swim lanes as SVG paths: the concurrent work of each worker over the run. No IO."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from staleflow.monitor.lanes import Lane, Span
from staleflow.report.charts import SIDE, Path, Tick, time_ticks

Numbers = NDArray[np.float64]

MAX_LANES = 64
CLOSE = 8
"""Zoom factor from which more ticks are shown; keep it equal to the value in the page's script."""
FINEST = 4_000
"""Maximum pieces of one lane, which sets the resolution when zoomed in."""
MAX_PIECES = 120_000
"""Maximum pieces of all lanes together, so that the page opens quickly."""
STAGE_COLOURS = ("orange", "teal", "purple", "red", "green")


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneRow:
    """One lane to draw."""

    kind: str
    worker: str
    busy: str
    """Formatted share of the time in which the worker was busy."""
    most: int
    """Maximum of concurrent work items."""
    path: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Lanes:
    """All lanes on one time axis."""

    rows: list[LaneRow]
    left_out: int
    ticks: list[list[Tick]]
    """Coarse ticks, and the additional ticks of two zoom levels."""
    seconds: float
    legend: list[tuple[str, str]]


def lane_rows(shown: Sequence[Lane], window_s: tuple[float, float]) -> Lanes:
    """Return the lanes; heights are concurrent items relative to the maximum of any worker of the same kind."""
    drawn = chosen(shown)
    kinds = list(dict.fromkeys(lane.kind for lane in drawn))
    pieces = max(min(FINEST, MAX_PIECES // max(len(drawn), 1)), 200)
    edges = np.linspace(window_s[0], max(window_s[1], window_s[0] + 1e-6), pieces + 1)
    loads = [_load(lane.spans, edges) for lane in drawn]
    most = {kind: max(_max_concurrent(lane.spans) for lane in drawn if lane.kind == kind) for kind in kinds}
    rows = [
        LaneRow(
            kind=lane.kind,
            worker=lane.worker,
            busy=f"{100 * _busy(lane.spans, window_s):.0f} %",
            most=_max_concurrent(lane.spans),
            path=Path(kind="area", colour=_colour(lane.kind, kinds), d=_steps(load / most[lane.kind])),
        )
        for lane, load in zip(drawn, loads, strict=True)
    ]
    return Lanes(
        rows=rows,
        left_out=len(shown) - len(drawn),
        ticks=_ticks(window_s),
        seconds=window_s[1] - window_s[0],
        legend=[(_colour(kind, kinds), kind) for kind in kinds],
    )


def _ticks(window_s: tuple[float, float]) -> list[list[Tick]]:
    result, shown = list[list[Tick]](), set[float]()
    for zoom in (1, CLOSE, CLOSE**2):
        ticks = [tick for tick in time_ticks(window_s, 7 * zoom) if round(tick.at, 6) not in shown]
        shown |= {round(tick.at, 6) for tick in ticks}
        result.append(ticks)
    return result


def chosen(shown: Sequence[Lane]) -> list[Lane]:
    """Select at most ``MAX_LANES`` lanes; the trainer and every stage are always included."""
    others = [lane for lane in shown if lane.kind != "engine"]
    engines = [lane for lane in shown if lane.kind == "engine"]
    first = engines[: max(MAX_LANES - len(others), MAX_LANES // 2)]
    return [*first, *others[: MAX_LANES - len(first)]]


def _colour(kind: str, kinds: Sequence[str]) -> str:
    if kind in ("engine", "trainer"):
        return "blue" if kind == "engine" else "ink"
    stages = [name for name in kinds if name not in ("engine", "trainer")]
    return STAGE_COLOURS[stages.index(kind) % len(STAGE_COLOURS)]


def _load(spans: Sequence[Span], edges: Numbers) -> Numbers:
    """Return the mean number of open spans between consecutive edges."""
    total = _work(np.array([span.begin_s for span in spans]), edges)
    total -= _work(np.array([span.end_s for span in spans]), edges)
    load: Numbers = np.maximum(np.diff(total) / np.diff(edges), 0.0)
    return load


def _work(begins: Numbers, edges: Numbers) -> Numbers:
    """Return the sum of the seconds since each start, at each edge."""
    begins = np.sort(begins)
    before = np.searchsorted(begins, edges)
    sums = np.concatenate([[0.0], np.cumsum(begins)])
    work: Numbers = before * edges - sums[before]
    return work


def _max_concurrent(spans: Sequence[Span]) -> int:
    changes = sorted((moment, change) for span in spans for moment, change in ((span.begin_s, 1), (span.end_s, -1)))
    most = now = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return max(most, 1)


def _busy(spans: Sequence[Span], window_s: tuple[float, float]) -> float:
    """Return the share of the window in which at least one span is open."""
    low, high = window_s
    total, until = 0.0, low
    for span in sorted(spans):
        begin, end = max(span.begin_s, until), min(span.end_s, high)
        if end > begin:
            total += end - begin
            until = end
    return total / (high - low) if high > low else 0.0


def _steps(heights: Numbers) -> str:
    """Return a step outline as an SVG path; adjacent pieces of equal height are merged."""
    levels = np.rint(heights * SIDE / 20).astype(int) * 20
    width = SIDE / len(levels)
    changes = [0, *(np.flatnonzero(np.diff(levels)) + 1).tolist(), len(levels)]
    parts = [f"M0 {SIDE}"]
    for at, until in pairwise(changes):
        parts.append(f"V{SIDE - int(levels[at])}H{width * until:.6g}")
    return "".join(parts) + f"V{SIDE}Z"
