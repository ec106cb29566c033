"""Charts of the metrics in ``metrics.jsonl``. No IO."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from staleflow.metrics.names import METRICS, PLACES
from staleflow.monitor.lineages import Lineages
from staleflow.report.charts import Chart, Series, lines, stack

LEARNING = (
    ("Reward", ("reward/mean", "reward/eval")),
    ("Length", ("length/mean", "length/p99")),
    ("Truncated completions", ("length/truncated",)),
    ("Entropy of the policy", ("entropy",)),
    ("Loss", ("loss",)),
    ("Gradient norm", ("grad_norm",)),
    ("Mismatch of engine and trainer", ("mismatch_kl",)),
    ("Effective sample size", ("is_weight/ess",)),
    ("Divergence from the reference", ("kl/reference",)),
    ("Clipped tokens", ("clip/low", "clip/high")),
)
STALENESS = (
    ("Age on the way", ("off_policy/in_flight/mean", "off_policy/in_queue/mean")),
    ("Too old to train", ("staleness/masked_token_ratio",)),
)
TIME = (
    ("Idle", ("trainer/idle_ratio", "rollout/idle_ratio")),
    ("Waits of the trainer", ("elastic/starved", "elastic/blocked", "elastic/pinned")),
    ("Recommended change of the engines", ("elastic/engines",)),
    ("Throughput", ("perf/tokens_per_second",)),
)
STEP = ("time/wait_for_batch", "time/train", "time/publish", "time/checkpoint", "time/eval")
COLOURS = ("blue", "orange", "green", "purple", "teal", "red", "grey")
STEP_COLOURS = ("red", "blue", "purple", "teal", "grey")


class Curves:
    """Every metric by step.

    If a step was reported twice or trained again, the last value counts. Steps that were rolled back and not trained
    again are left out.
    """

    def __init__(self, lines: Iterable[Mapping[str, Any]]) -> None:
        rows: dict[int, dict[str, float]] = {}
        lineages = Lineages()
        for line in lines:
            step = line.get("step")
            if isinstance(step, int):
                lineages.take_back(line, rows)
                row = rows.setdefault(step, {})
                row.update({key: value for key, value in line.items() if _is_number(key, value)})
        self.steps = sorted(rows)
        self._rows = [rows[step] for step in self.steps]
        self.names = list(dict.fromkeys(name for row in self._rows for name in row))

    def values(self, name: str) -> list[float | None]:
        """Return one value per step; None where the metric was not measured."""
        return [row.get(name) for row in self._rows]

    def measured(self, name: str) -> list[float]:
        """Return the measured values only."""
        return [value for value in self.values(name) if value is not None]

    def moves(self, name: str) -> bool:
        """Return whether the metric changes."""
        return len(set(self.measured(name))) > 1

    def chart(self, title: str, names: Sequence[str]) -> Chart | None:
        """Return a chart of the metrics that change; None if none does."""
        if not any(self.moves(name) for name in names):
            return None
        shown = [name for name in names if self.measured(name)]
        result = [METRICS[name] for name in shown if name in METRICS]
        series = [Series(name=name, colour=COLOURS[at], values=self.values(name)) for at, name in enumerate(shown)]
        unit = result[0].unit if result else ""
        meaning = "; ".join(f"{name}: {METRICS[name].meaning}" for name in shown if name in METRICS)
        return lines(title, self.steps, series, unit=unit, meaning=meaning)

    def group(self, wanted: Iterable[tuple[str, Sequence[str]]]) -> list[Chart]:
        """Return the charts that are not empty."""
        charts = (self.chart(title, names) for title, names in wanted)
        return [chart for chart in charts if chart is not None]

    def step_times(self) -> Chart | None:
        """Return the trainer's time per step as stacked areas."""
        parts = [(name, colour) for name, colour in zip(STEP, STEP_COLOURS, strict=True) if any(self.measured(name))]
        if not parts:
            return None
        trained = [at for at, step in enumerate(self.steps) if step >= 0]
        series = [
            Series(
                name=name.partition("/")[2].replace("_", " "),
                colour=colour,
                values=[self.values(name)[at] for at in trained],
            )
            for name, colour in parts
        ]
        return stack("The trainer's time", [self.steps[at] for at in trained], series, unit="s a step")

    def others(self) -> list[Chart]:
        """Return charts of all other metrics, including the user's own."""
        shown = {name for _, names in (*LEARNING, *STALENESS, *TIME) for name in names} | set(STEP)
        return self.group((name, (name,)) for name in self.names if name not in shown)


def _is_number(key: str, value: object) -> bool:
    return key not in PLACES and isinstance(value, int | float) and not isinstance(value, bool)
