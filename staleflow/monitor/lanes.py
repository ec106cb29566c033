"""Who was at work when, from what a run leaves behind: the trace, and the stages' times of each trajectory server.

Times in seconds since the first line of the trace, by the scheduler's clock; those of the stages are by their shards'
clocks, the same on one host.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple


class Span(NamedTuple):
    """One piece of work."""

    begin_s: float
    end_s: float


class Lane(NamedTuple):
    """One worker's, in order of beginning."""

    kind: str
    """``engine``, ``trainer``, or the name of a stage."""
    worker: str
    spans: list[Span]


def lanes(events: Iterable[dict[str, Any]], stages: Iterable[dict[str, Any]]) -> list[Lane]:
    """Engines, stages, trainer; in each, workers in the order in which they came."""
    found: dict[tuple[str, str], list[Span]] = {}
    begun: dict[tuple[str, int], tuple[str, float]] = {}
    origin_s: float | None = None
    trained: list[tuple[str, Span]] = []
    for event in events:
        now_s = event["m"] / 1e9
        origin_s = now_s if origin_s is None else origin_s
        match event["ev"]:
            case "reserve":
                begun["lease", event["lease"]] = event["worker"], now_s
                found.setdefault(("engine", event["worker"]), [])
            case "push" | "release" if (start := begun.pop(("lease", event["lease"]), None)) is not None:
                found["engine", start[0]].append(Span(start[1], now_s))
            case "deliver":
                begun.setdefault(("step", event["step"]), ("trainer", now_s))
            case "consume" if (start := begun.pop(("step", event["step"]), None)) is not None:
                trained.append((start[0], Span(start[1], now_s)))
            case _:
                pass
    for line in stages:
        found.setdefault((line["stage"], line["worker"]), []).append(Span(line["begin_s"], line["end_s"]))
    for worker, span in trained:
        found.setdefault(("trainer", worker), []).append(span)
    zero = origin_s or 0.0
    shifted = {key: sorted(Span(a - zero, b - zero) for a, b in spans if b >= zero) for key, spans in found.items()}
    return [Lane(kind, worker.partition(".")[0], spans) for (kind, worker), spans in shifted.items() if spans]


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
    """Of every trajectory server of the run, older files first; a torn line is left out."""
    for path in sorted(run_dir.glob("stages-*.jsonl"), key=lambda path: (not path.name.endswith(".old.jsonl"), path)):
        for line in path.read_bytes().split(b"\n"):
            try:
                yield json.loads(line)
            except ValueError:
                continue
