"""Picture of some steps of a simulated run: the engine and version of each group, and the step that trained it."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

from docs.generate.svg import box, line, picture, words
from staleflow.configs.loading.load import load
from staleflow.protocols.consistency.bucket import by_lease
from staleflow.sim.simulate import simulate
from staleflow.trace.fold import Batch, Fold, TracedGroup
from staleflow.trace.reader import read_lines

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


def timeline() -> str:
    """Return the picture."""
    groups, steps = _observe()
    end_s = max(step.consumed_s for step in steps)
    parts = list(_parts(groups, steps, (WIDTH - LEFT - 10) / end_s, end_s))
    return picture(WIDTH, 216, parts, "Two engines generate; the trainer trains on data at most one version old")


def _observe() -> tuple[list[TracedGroup], list[Batch]]:
    """Return the pushed groups, in the order of their leases, and the trained batches."""
    with tempfile.TemporaryDirectory(prefix="staleflow-timeline-") as place:
        folder = Path(place)
        (folder / "timeline.toml").write_text(CONFIG)
        simulate(load(folder / "timeline.toml"), run_dir=folder / "run")
        fold = Fold()
        lines = fold.over(read_lines(folder / "run" / "trace.jsonl"))
        groups = [fold.group for line in lines if line.ev == "push" and fold.group is not None]
    return sorted(groups, key=by_lease), fold.trained


def _parts(finished: list[TracedGroup], steps: list[Batch], scale: float, end_s: float) -> Iterator[str]:
    top = 24.0
    for number, worker in enumerate(sorted({group.worker for group in finished})):
        rows = _rows([group for group in finished if group.worker == worker])
        yield words(6, top + ROW, f"engine {number}")
        for row, groups in enumerate(rows):
            for group in groups:
                yield from _bar(group, LEFT + group.reserved_s * scale, top + row * ROW, scale, end_s)
        top += len(rows) * ROW + 10
    yield words(6, top + 24, "trainer")
    free_s = 0.0  # a batch may be fetched while the step before computes
    for batch in steps:
        begin_s, free_s = max(batch.delivered_s or 0.0, free_s), batch.consumed_s
        x, width = LEFT + begin_s * scale, (batch.consumed_s - begin_s) * scale
        yield box(x, top, width - 3, 36, "box")
        yield words(x + width / 2, top + 15, f"step {batch.step}", "middle")
        yield words(x + width / 2, top + 29, f"staleness {batch.age_max}", "middle small")
        if batch is not steps[-1]:
            yield line(x + width - 1, 18, x + width - 1, top + 36)
            yield words(x + width - 1, 12, f"version {batch.step + 1} is out", "middle small")


def _bar(group: TracedGroup, x: float, y: float, scale: float, end_s: float) -> Iterator[str]:
    width = (min(group.pushed_s, end_s) - group.reserved_s) * scale
    yield box(x, y, max(width - 2, 1), ROW - 4, f"v{group.version % 5}")
    if width > 24:
        yield words(x + 5, y + 13, f"v{group.version}", "on small")


def _rows(groups: list[TracedGroup]) -> list[list[TracedGroup]]:
    """Distribute groups over rows so that groups written at the same time lie in different rows."""
    rows: list[list[TracedGroup]] = []
    for group in groups:
        free = next((row for row in rows if row[-1].pushed_s <= group.reserved_s + 1e-9), None)
        if free is None:
            rows.append([group])
        else:
            free.append(group)
    return rows
