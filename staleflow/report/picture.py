# pyright: basic, reportMissingImports=false
"""Draw the image of ``staleflow trace plot``: lanes, ages and waits. matplotlib is in the extra ``plot``."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from staleflow.configs.errors import ConfigError
from staleflow.configs.loading.extras import install
from staleflow.monitor.lanes import Lane
from staleflow.report.facts import Facts
from staleflow.report.lane_paths import chosen
from staleflow.trace.fold import Batch

COLOURS = ("tab:orange", "tab:green", "tab:purple", "tab:red", "tab:olive", "tab:cyan", "tab:pink", "tab:brown")
OPTIONS: Any = {"svg.fonttype": "none", "svg.hashsalt": "staleflow", "font.size": 9, "axes.titlesize": 10}


def picture(shown: Sequence[Lane], facts: Facts, path: Path, *, window_s: tuple[float, float]) -> None:
    """Write ``path``, on one axis of seconds: a lane a worker, the age of what each step trained, the trainer's waits.

    ``ConfigError`` without matplotlib, or for a kind of file that it does not write.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError("--out", str(path), f"it needs matplotlib: {install('plot')}") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawn = chosen(shown)
    steps = [step for step in facts.steps if window_s[0] <= step.consumed_s <= window_s[1]]
    tall = 1.0 + 0.28 * len(drawn)
    with matplotlib.rc_context(OPTIONS):
        rows = [tall, 1.6, 1.2] if steps else [tall]
        figure, axes = pyplot.subplots(
            len(rows),
            1,
            sharex=True,
            squeeze=False,
            figsize=(13, sum(rows) + 0.8),
            height_ratios=rows,
            layout="constrained",
        )
        _lanes(axes[0][0], drawn)
        if steps:
            _ages(axes[1][0], steps, facts.max_staleness)
            _waits(axes[2][0], steps)
        left_out = f"; {len(shown) - len(drawn)} more are not shown" if len(drawn) < len(shown) else ""
        axes[0][0].set_title(f"{facts.run}: busy workers over time (darker: more at once){left_out}", loc="left")
        axes[-1][0].set(xlim=window_s, xlabel="seconds")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=120)
        pyplot.close(figure)


def _lanes(axis: Any, drawn: Sequence[Lane]) -> None:
    stages = [kind for kind in dict.fromkeys(lane.kind for lane in drawn) if kind not in ("engine", "trainer")]
    colours = {"engine": "tab:blue", "trainer": "0.4"}
    colours |= {stage: COLOURS[number % len(COLOURS)] for number, stage in enumerate(stages)}
    for row, lane in enumerate(drawn):
        bars = [(span.begin_s, span.end_s - span.begin_s) for span in lane.spans]
        alpha = 0.15 if lane.kind == "engine" else 0.7  # an engine writes several groups at once: darker is more
        axis.broken_barh(bars, (row + 0.1, 0.8), facecolors=colours[lane.kind], alpha=alpha, linewidth=0)
    axis.set_ylim(len(drawn), 0)
    axis.set_yticks([row + 0.5 for row in range(len(drawn))])
    axis.set_yticklabels([lane.worker for lane in drawn], fontsize=8)


def _ages(axis: Any, steps: Sequence[Batch], bound: int) -> None:
    """Plot the mean and maximum age of each step at its training time, and the bound as a line."""
    moments = [step.consumed_s for step in steps]
    axis.step(moments, [step.age_max for step in steps], where="mid", color="tab:orange", linewidth=1, label="oldest")
    axis.plot(moments, [step.age_mean for step in steps], color="tab:blue", label="mean")
    axis.axhline(bound, color="tab:red", linestyle="--", linewidth=1, label=f"bound {bound}")
    axis.set(ylabel="versions", ylim=(0, None))
    axis.set_title("Age of the trained groups", loc="left")
    axis.legend(fontsize=8, ncols=3, loc="upper right", frameon=False, bbox_to_anchor=(1, 1.25))


def _waits(axis: Any, steps: Sequence[Batch]) -> None:
    """Plot a bar for each wait that ends when the batch was complete; width and height are the duration."""
    shown = [step for step in steps if step.waited_s > 0]
    widths = [step.waited_s for step in shown]
    axis.bar([step.sealed_s - step.waited_s for step in shown], widths, width=widths, align="edge", color="tab:red")
    axis.set(ylabel="seconds")
    axis.set_title("The trainer waits for its batch", loc="left")
