"""Picture of some steps of a simulated run: the engine and version of each group, and the step that trained it."""

import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from docs.generate.svg import box, line, picture, words
from staleflow.configs.loading.load import load
from staleflow.sim.simulate import simulate

CONFIG = """
name = "timeline"
seed = 4
[prompts]
source = "staleflow.examples.quickstart.task:prompts"
[reward]
run = "staleflow.examples.quickstart.task:reward"
[staleness]
max_staleness = 1
[rollout]
engine = "simulated"
workers = 2
group_size = 1
max_inflight = 2
max_new_tokens = 1000
filter = "none"
[rollout.simulated]
mean_tokens = 200.0
sigma = 0.7
k1 = 0.0
k2 = 0.01
k3 = 0.0
[coordination]
routing = "round_robin"
[trainer]
backend = "simulated"
steps = 5
batch_size = 4
eval_prompts = 0
simulated_step_s = 2.0
"""
WIDTH, LEFT, ROW = 900, 92, 22


@dataclass(slots=True)
class Group:
    """One group from its lease to its push."""

    worker: str
    version: int
    begin_s: float
    end_s: float = 0.0


@dataclass(slots=True)
class Observed:
    """Times and staleness read from the trace of a run."""

    groups: dict[int, Group] = field(default_factory=dict[int, Group])
    started: dict[int, float] = field(default_factory=dict[int, float])
    """Start of each step, in seconds."""
    ended: dict[int, float] = field(default_factory=dict[int, float])
    ages: dict[int, list[int]] = field(default_factory=dict[int, list[int]])


def timeline() -> str:
    """Return the picture."""
    observed = _observe(_events())
    end_s = max(observed.ended.values())
    parts = list(_parts(observed, (WIDTH - LEFT - 10) / end_s, end_s))
    return picture(WIDTH, 216, parts, "Two engines generate; the trainer trains on data at most one version old")


def _events() -> Iterator[dict[str, object]]:
    with tempfile.TemporaryDirectory(prefix="staleflow-timeline-") as place:
        folder = Path(place)
        (folder / "timeline.toml").write_text(CONFIG)
        simulate(load(folder / "timeline.toml"), run_dir=folder / "run")
        for text in (folder / "run" / "trace.jsonl").read_text().splitlines():
            yield json.loads(text)


def _observe(events: Iterator[dict[str, object]]) -> Observed:
    observed, zero = Observed(), 0.0
    for raw in events:
        event: dict[str, Any] = raw
        now_s = event["m"] / 1e9 - zero
        match event["ev"]:
            case "open":
                zero = event["m"] / 1e9
            case "reserve":
                observed.groups[event["group"]] = Group(event["worker"], event["version"], now_s)
            case "push":
                observed.groups[event["group"]].end_s = now_s
            case "seal":
                observed.ages[event["step"]] = [event["step"] - member["version"] for member in event["members"]]
            case "deliver":
                observed.started[event["step"]] = now_s
            case "consume":
                observed.ended[event["step"]] = now_s
            case _:
                pass
    return observed


def _parts(observed: Observed, scale: float, end_s: float) -> Iterator[str]:
    finished = [group for group in observed.groups.values() if group.end_s]
    top = 24.0
    for number, worker in enumerate(sorted({group.worker for group in finished})):
        rows = _rows([group for group in finished if group.worker == worker])
        yield words(6, top + ROW, f"engine {number}")
        for row, groups in enumerate(rows):
            for group in groups:
                yield from _bar(group, LEFT + group.begin_s * scale, top + row * ROW, scale, end_s)
        top += len(rows) * ROW + 10
    yield words(6, top + 24, "trainer")
    for step, begin_s in observed.started.items():
        begin_s = max(
            begin_s, observed.ended.get(step - 1, 0.0)
        )  # a batch may be fetched while the step before computes
        x, width = LEFT + begin_s * scale, (observed.ended[step] - begin_s) * scale
        yield box(x, top, width - 3, 36, "box")
        yield words(x + width / 2, top + 15, f"step {step}", "middle")
        yield words(x + width / 2, top + 29, f"staleness {max(observed.ages[step])}", "middle small")
        if step + 1 in observed.started:
            yield line(x + width - 1, 18, x + width - 1, top + 36)
            yield words(x + width - 1, 12, f"version {step + 1} is out", "middle small")


def _bar(group: Group, x: float, y: float, scale: float, end_s: float) -> Iterator[str]:
    width = (min(group.end_s, end_s) - group.begin_s) * scale
    yield box(x, y, max(width - 2, 1), ROW - 4, f"v{group.version % 5}")
    if width > 24:
        yield words(x + 5, y + 13, f"v{group.version}", "on small")


def _rows(groups: list[Group]) -> list[list[Group]]:
    """Distribute groups over rows so that groups written at the same time lie in different rows."""
    rows: list[list[Group]] = []
    for group in sorted(groups, key=lambda group: group.begin_s):
        free = next((row for row in rows if row[-1].end_s <= group.begin_s + 1e-9), None)
        if free is None:
            rows.append([group])
        else:
            free.append(group)
    return rows
