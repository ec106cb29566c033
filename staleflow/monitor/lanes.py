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
from staleflow.protocols.consistency.groups import LEASED
from staleflow.trace.events import Consume, Push, Release, Reserve
from staleflow.trace.fold import Fold
from staleflow.trace.reader import Line

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


class Lanes:
    """Collects the lanes of engines and trainer from the lines that ``fold`` has applied."""

    def __init__(self, fold: Fold) -> None:
        self._fold = fold
        self._engines: dict[str, list[Span]] = {}
        self._trainer: list[Span] = []

    def see(self, line: Line) -> None:
        """Add the line that the fold applied last."""
        fold, group, batch = self._fold, self._fold.group, self._fold.batch
        match line.event:
            case Reserve() as event:
                self._engines.setdefault(worker_name(event.worker), [])
            case Push() | Release() if group is not None and (group.state is LEASED or line.ev == "push"):
                self._engines[worker_name(group.worker)].append(Span(group.reserved_s, fold.now_s))
            case Consume() if batch is not None and batch.delivered_s is not None:
                # the next batch is delivered while the trainer still works on one
                free_s = self._trainer[-1].end_s if self._trainer else 0.0
                self._trainer.append(Span(max(batch.delivered_s, free_s), fold.now_s))
            case _:
                pass

    def all(self, stages: Iterable[dict[str, Any]]) -> list[Lane]:
        """Return the lanes of engines, stages and trainer, in this order; workers in order of their first event."""
        spans_of = {("engine", worker): spans for worker, spans in self._engines.items()}
        for line in stages:
            begin_s, end_s = self._fold.axis.at(line["begin_s"]), self._fold.axis.at(line["end_s"])
            if end_s >= 0:
                spans_of.setdefault((line["stage"], worker_name(line["worker"])), []).append(Span(begin_s, end_s))
        spans_of.setdefault(("trainer", "trainer"), []).extend(self._trainer)
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
