# pyright: basic, reportMissingImports=false
"""The curves of the learning benchmark as pictures. matplotlib is an extra of the benchmarks only."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.learning_report import Run, choice, final, full_window, grouped, seconds

COLOURS = {"none": "tab:red", "tis": "tab:blue", "decoupled": "tab:orange", "masked_is": "tab:green"}

LABELS = {"samples": "samples", "seconds": "seconds, engine and trainer on a core each"}


def plots(runs: Sequence[Run], stem: Path) -> list[Path]:
    """One picture a task, and one of all; beside ``stem``. Nothing without matplotlib, or without runs."""
    try:
        import matplotlib
    except ImportError:
        return []
    matplotlib.use("Agg")
    tasks = sorted({run["key"]["task"] for run in runs})
    made = [_curves(runs, task, stem) for task in tasks if any(run["key"]["eta"] for run in runs)]
    return [*made, _summary(runs, tasks, stem)] if made else []


def _curves(runs: Sequence[Run], task: str, stem: Path) -> Path:
    """Reward against samples and against time: a column each max_staleness, two rows each bound."""
    from matplotlib import pyplot

    mine = [run for run in runs if run["key"]["task"] == task]
    etas = sorted({run["key"]["eta"] for run in mine} - {0})
    bounds = [bound for bound in ("trajectory", "token") if any(_is(run, bound) for run in mine)]
    figure, axes = pyplot.subplots(
        2 * len(bounds), len(etas), figsize=(3.6 * len(etas), 5 * len(bounds)), squeeze=False, sharey=True
    )
    for row, bound in enumerate(bounds):
        for column, eta in enumerate(etas):
            for part, over in enumerate(("samples", "seconds")):
                axis = axes[2 * row + part][column]
                axis.set_title(f"{bound} bound, max_staleness {eta}", fontsize=9)
                axis.set_xlabel(LABELS[over], fontsize=8)
                for name, same in grouped(mine).items():
                    if name[2] == 0:
                        _curve(axis, same, over, label="synchronous", color="black", linestyle="--")
                    elif name[1:3] == (bound, eta):
                        _curve(axis, same, over, label=name[3], color=COLOURS.get(name[3]))
        axes[2 * row][0].set_ylabel("held-out reward")
        axes[2 * row + 1][0].set_ylabel("held-out reward")
    axes[0][0].legend(fontsize=8)
    figure.suptitle(f"{task}: mean over seeds, band: least to most")
    return _saved(figure, stem.with_name(f"{stem.name}-{task}.png"))


def _is(run: Run, bound: str) -> bool:
    return bool(run["key"]["eta"]) and run["key"]["bound"] == bound


def _curve(axis: Any, same: Sequence[Run], over: str, **style: Any) -> None:
    at = np.array(same[0]["at"])
    if over == "samples":
        places = at * same[0]["samples_a_step"]
    else:
        elapsed = np.mean([[0.0, *seconds(run)] for run in same], axis=0)
        places = elapsed[at]
    rewards = np.array([run["reward"] for run in same])
    axis.plot(places, rewards.mean(0), linewidth=1.2, **style)
    axis.fill_between(places, rewards.min(0), rewards.max(0), color=style.get("color"), alpha=0.12)


def _summary(runs: Sequence[Run], tasks: Sequence[str], stem: Path) -> Path:
    """Final reward and effective sample size against max_staleness: solid trajectory bound, dotted token bound."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, len(tasks), figsize=(4.2 * len(tasks), 7), squeeze=False, sharex=True)
    for column, task in enumerate(tasks):
        mine = [run for run in runs if run["key"]["task"] == task]
        base = [final(run) for run in mine if run["key"]["eta"] == 0]
        if base:
            axes[0][column].axhspan(min(base), max(base), color="grey", alpha=0.3, label="synchronous, all seeds")
        for bound, style in (("trajectory", "-o"), ("token", ":s")):
            for correction, colour in COLOURS.items():
                same = [run for run in mine if choice(run)[1] == bound and choice(run)[3] == correction]
                etas = sorted({run["key"]["eta"] for run in same} - {0})
                if not etas:
                    continue
                by = [[run for run in same if run["key"]["eta"] == eta] for eta in etas]
                label = f"{correction}, {bound}"
                axes[0][column].plot(
                    etas, [np.mean([final(r) for r in b]) for b in by], style, color=colour, label=label
                )
                ess = [np.mean([v for r in b for v in full_window(r, "is_weight/ess")]) for b in by]
                axes[1][column].plot(etas, ess, style, color=colour)
        axes[0][column].set_title(task)
        axes[1][column].set_xlabel("max_staleness")
        axes[1][column].set_xscale("log", base=2)
        ticks = sorted({run["key"]["eta"] for run in mine} - {0})
        axes[1][column].set_xticks(ticks, labels=[str(tick) for tick in ticks])
    axes[0][0].set_ylabel("final held-out reward")
    axes[1][0].set_ylabel("effective sample size, share of the tokens")
    axes[0][0].legend(fontsize=7)
    return _saved(figure, stem.with_name(f"{stem.name}-summary.png"))


def _saved(figure: Any, path: Path) -> Path:
    from matplotlib import pyplot

    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path
