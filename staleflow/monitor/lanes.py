"""Who was at work when, from what a run leaves behind: the trace, and the stages' times of each trajectory server.

Times in seconds since the first line of the trace, by the scheduler's clock, without those in which there was no
scheduler; those of the stages are by their shards' clocks, the same on one host.
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
    """What is read of a line that a trajectory server writes of a stage's work."""

    stage: str
    worker: str
    groups: int
    begin_s: _Seconds
    end_s: _Seconds


_stage_line = msgspec.json.Decoder(_StageLine).decode


class Span(NamedTuple):
    """One piece of work."""

    begin_s: float
    end_s: float


class Lane(NamedTuple):
    """One worker's, in order of beginning; of all processes that had its name."""

    kind: str
    """``engine``, ``trainer``, or the name of a stage."""
    worker: str
    spans: list[Span]


def lanes(events: Iterable[dict[str, Any]], stages: Iterable[dict[str, Any]]) -> list[Lane]:
    """Engines, stages, trainer; in each, workers in the order in which they came."""
    found: dict[tuple[str, str], list[Span]] = {}
    begun: dict[tuple[str, int], tuple[str, float]] = {}
    axis = Axis()
    trained: list[tuple[str, Span]] = []
    free_s = 0.0  # its next batch is delivered while the trainer is still at work on one
    for event in events:
        now_s = axis.see(event)
        match event["ev"]:
            case "reserve":
                worker = worker_name(event["worker"])
                begun["lease", event["lease"]] = worker, now_s
                found.setdefault(("engine", worker), [])
            case "push" | "release" if (start := begun.pop(("lease", event["lease"]), None)) is not None:
                found["engine", start[0]].append(Span(start[1], now_s))
            case "deliver":
                begun.setdefault(("step", event["step"]), ("trainer", now_s))
            case "consume" if (start := begun.pop(("step", event["step"]), None)) is not None:
                trained.append((start[0], Span(max(start[1], free_s), now_s)))
                free_s = now_s
            case _:
                pass
    for line in stages:
        begin_s, end_s = axis.at(line["begin_s"]), axis.at(line["end_s"])
        if end_s >= 0:
            found.setdefault((line["stage"], worker_name(line["worker"])), []).append(Span(begin_s, end_s))
    for worker, span in trained:
        found.setdefault(("trainer", worker), []).append(span)
    return [Lane(kind, worker, sorted(spans)) for (kind, worker), spans in found.items() if spans]


def overlaps(shown: Sequence[Lane]) -> list[tuple[str, str, float]]:
    """Each two stages, and the seconds in which both were at work."""
    kinds = dict.fromkeys(lane.kind for lane in shown if lane.kind not in ("engine", "trainer"))
    merged = {kind: _merged([span for lane in shown if lane.kind == kind for span in lane.spans]) for kind in kinds}
    return [(one, other, _common(merged[one], merged[other])) for one, other in combinations(merged, 2)]


def _merged(spans: Sequence[Span]) -> list[Span]:
    """Disjoint ones that cover the same."""
    found: list[Span] = []
    for span in sorted(spans):
        if found and span.begin_s <= found[-1].end_s:
            found[-1] = Span(found[-1].begin_s, max(found[-1].end_s, span.end_s))
        else:
            found.append(span)
    return found


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
    """Of every trajectory server of the run, older files first; a torn or strange line is left out."""
    for path in sorted(run_dir.glob("stages-*.jsonl"), key=lambda path: (not path.name.endswith(".old.jsonl"), path)):
        for line in path.read_bytes().split(b"\n"):
            try:
                yield all_printable(_stage_line(line))
            except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
                continue
