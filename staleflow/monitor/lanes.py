"""Reconstruct when each worker was busy, from the trace and the stage times that trajectory servers record.

Times are seconds since the first event of the trace by the scheduler's clock, without the periods in which no scheduler
ran. Times of stages come from the clocks of their shards, which agree with the scheduler's on one host.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypedDict

import msgspec
from msgspec import Meta

from staleflow.monitor.words import worker_name
from staleflow.process.sanitize import all_printable
from staleflow.trace.running_time import Axis

_Seconds = Annotated[float, Meta(ge=0, le=2**53)]


class _StageLine(TypedDict):
    """The fields used here of a line that a trajectory server writes about a stage's work."""

    stage: str
    worker: str
    groups: int
    begin_s: _Seconds
    end_s: _Seconds


_stage_line = msgspec.json.Decoder(_StageLine).decode


class Span(NamedTuple):
    """Interval in which a worker was busy."""

    begin_s: float
    end_s: float


class Lane(NamedTuple):
    """Busy intervals of one worker in start order, over all processes that had its name."""

    kind: str
    """``engine``, ``trainer``, or the name of a stage."""
    worker: str
    spans: list[Span]


def lanes(events: Iterable[dict[str, Any]], stages: Iterable[dict[str, Any]]) -> list[Lane]:
    """Return the lanes of engines, stages and trainer, in this order; workers in order of their first event."""
    spans_of: dict[tuple[str, str], list[Span]] = {}
    open_work: dict[tuple[str, int], tuple[str, float]] = {}
    axis = Axis()
    trained: list[tuple[str, Span]] = []
    free_s = 0.0  # end of the previous step: the next batch is delivered while the trainer still works on one
    for event in events:
        now_s = axis.see(event)
        match event["ev"]:
            case "reserve":
                worker = worker_name(event["worker"])
                open_work["lease", event["lease"]] = worker, now_s
                spans_of.setdefault(("engine", worker), [])
            case "push" | "release" if (start := open_work.pop(("lease", event["lease"]), None)) is not None:
                spans_of["engine", start[0]].append(Span(start[1], now_s))
            case "deliver":
                open_work.setdefault(("step", event["step"]), ("trainer", now_s))
            case "consume" if (start := open_work.pop(("step", event["step"]), None)) is not None:
                trained.append((start[0], Span(max(start[1], free_s), now_s)))
                free_s = now_s
            case _:
                pass
    for line in stages:
        begin_s, end_s = axis.at(line["begin_s"]), axis.at(line["end_s"])
        if end_s >= 0:
            spans_of.setdefault((line["stage"], worker_name(line["worker"])), []).append(Span(begin_s, end_s))
    for worker, span in trained:
        spans_of.setdefault(("trainer", worker), []).append(span)
    return [Lane(kind, worker, sorted(spans)) for (kind, worker), spans in spans_of.items() if spans]


def overlaps(shown: Sequence[Lane]) -> list[tuple[str, str, float]]:
    """Return (stage, stage, seconds in which both were busy) for each pair of stages."""
    kinds = dict.fromkeys(lane.kind for lane in shown if lane.kind not in ("engine", "trainer"))
    merged = {kind: _merged([span for lane in shown if lane.kind == kind for span in lane.spans]) for kind in kinds}
    return [(one, other, _common(merged[one], merged[other])) for one, other in combinations(merged, 2)]


def _merged(spans: Sequence[Span]) -> list[Span]:
    """Return disjoint spans with the same union."""
    spans_of: list[Span] = []
    for span in sorted(spans):
        if spans_of and span.begin_s <= spans_of[-1].end_s:
            spans_of[-1] = Span(spans_of[-1].begin_s, max(spans_of[-1].end_s, span.end_s))
        else:
            spans_of.append(span)
    return spans_of


def _common(left: Sequence[Span], right: Sequence[Span]) -> float:
    total, i, j = 0.0, 0, 0
    while i < len(left) and j < len(right):
        total += max(0.0, min(left[i].end_s, right[j].end_s) - max(left[i].begin_s, right[j].begin_s))
        if left[i].end_s < right[j].end_s:
            i += 1
        else:
            j += 1
    return total


def stage_lines(run_dir: Path) -> Iterator[dict[str, Any]]:
    """Yield the stage lines of every trajectory server, older files first; malformed lines are skipped."""
    for path in sorted(run_dir.glob("stages-*.jsonl"), key=lambda path: (not path.name.endswith(".old.jsonl"), path)):
        for line in path.read_bytes().split(b"\n"):
            try:
                yield all_printable(_stage_line(line))
            except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
                continue
