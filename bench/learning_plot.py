# pyright: basic, reportMissingImports=false
"""The curves of the learning benchmark as pictures. matplotlib is in the extra ``plot``."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.learning_report import NOISE, Run, choice, full_window, gains, grouped, seconds

COLOURS = {"none": "tab:red", "tis": "tab:blue", "decoupled": "tab:orange", "masked_is": "tab:green"}

LABELS = {"samples": "samples", "seconds": "seconds, engine and trainer on a core each"}


def plots(runs: Sequence[Run], stem: Path) -> list[Path]:
    """Draw one picture of all, then one per task and learning rate, next to ``stem``; none without matplotlib or
    runs."""
    try:
        import matplotlib
    except ImportError:
        return []
    matplotlib.use("Agg")
    stale = [choice(run)[:2] for run in runs if run["key"]["eta"]]
    pairs = [pair for pair in dict.fromkeys(name[:2] for name in grouped(runs)) if pair in stale]
    return [_summary(runs, stem), *(_curves(runs, task, lr, stem) for task, lr in pairs)] if pairs else []


def _curves(runs: Sequence[Run], task: str, lr: float, stem: Path) -> Path:
    """Reward against samples and against time: one column per max_staleness, two rows per bound."""
    from matplotlib import pyplot

    mine = [run for run in runs if choice(run)[:2] == (task, lr)]
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
                    if name[3] == 0:
                        _curve(axis, same, over, label="synchronous", color="black", linestyle="--")
                    elif name[2:4] == (bound, eta):
                        _curve(axis, same, over, label=name[4], color=COLOURS.get(name[4]))
        axes[2 * row][0].set_ylabel("held-out reward")
        axes[2 * row + 1][0].set_ylabel("held-out reward")
    _legend(axes[0][0], axes)
    figure.suptitle(f"{task}, learning rate {lr:g}: mean over seeds, band: least to most")
    return _saved(figure, stem.with_name(f"{stem.name}-{task}-{lr:g}.png"))


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


def _summary(runs: Sequence[Run], stem: Path) -> Path:
    """Difference to the synchronous reward, and effective sample size, against max_staleness: one column per task, two
    rows per learning rate; solid the trajectory bound, dotted the token bound."""
    from matplotlib import pyplot

    tasks = sorted({run["key"]["task"] for run in runs})
    rates = sorted({run["key"]["lr"] for run in runs}, reverse=True)
    figure, axes = pyplot.subplots(
        2 * len(rates), len(tasks), figsize=(4 * len(tasks), 5 * len(rates)), squeeze=False, sharex=True, sharey="row"
    )
    for row, lr in enumerate(rates):
        for column, task in enumerate(tasks):
            gain, ess = axes[2 * row][column], axes[2 * row + 1][column]
            gain.axhspan(-NOISE, NOISE, color="grey", alpha=0.25)
            _against_staleness([run for run in runs if choice(run)[:2] == (task, lr)], gain, ess)
            gain.set_title(f"{task}, learning rate {lr:g}", fontsize=10)
            ess.set_xlabel("max_staleness")
            ess.set_xscale("log", base=2)
        axes[2 * row][0].set_ylabel("final reward less synchronous")
        axes[2 * row + 1][0].set_ylabel("effective sample size")
    _legend(axes[1][0], axes)
    return _saved(figure, stem.with_name(f"{stem.name}-summary.png"))


def _against_staleness(runs: Sequence[Run], gain: Any, ess: Any) -> None:
    """Draw the lines of one task and learning rate in their two places; a seed's gain is a dot."""
    result, differences = grouped(runs), gains(runs)
    for bound, style in (("trajectory", "-"), ("token", ":")):
        for correction, colour in COLOURS.items():
            mine = [name for name in result if name[2:] == (bound, name[3] or None, correction) and differences[name]]
            if not mine:
                continue
            etas = [name[3] for name in mine]
            gain.plot(etas, [np.mean(differences[name]) for name in mine], style, color=colour,
                      label=f"{correction}, {bound}")  # fmt: skip
            for name in mine:
                gain.plot([name[3]] * len(differences[name]), differences[name], ".", color=colour, markersize=3)
            ess.plot(etas, [np.mean([v for r in result[name] for v in full_window(r, "is_weight/ess")])
                            for name in mine], style, color=colour)  # fmt: skip


def _legend(place: Any, axes: Any) -> None:
    """Each label of the picture once, in ``place``."""
    result = {label: line for axis in axes.flat for line, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    place.legend(result.values(), result.keys(), fontsize=7)


def _saved(figure: Any, path: Path) -> Path:
    """Save with a colour palette: a picture of lines is then a third as large."""
    from io import BytesIO

    from matplotlib import pyplot
    from PIL import Image

    figure.tight_layout()
    drawn = BytesIO()
    figure.savefig(drawn, dpi=80)
    pyplot.close(figure)
    Image.open(drawn).convert("RGB").quantize(256).save(path, optimize=True)
    return path
