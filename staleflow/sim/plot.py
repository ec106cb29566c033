# pyright: basic, reportMissingImports=false
"""Pictures of simulated runs: lengths, staleness, engines as swim-lanes. matplotlib is the extra ``plot``."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from staleflow.configs.errors import ConfigError
from staleflow.configs.loading.extras import install
from staleflow.sim.peers.compare import COLUMNS
from staleflow.sim.peers.conclusion import LEGEND, conclusion
from staleflow.sim.result import EngineRow, Result

MAX_LANES = 16
"""Maximum number of engines shown of a run."""
MOMENTS = 600
"""Resolution of a lane."""
STEPS = 40
"""Steps of the fastest run that the lanes show."""
MAX_AGE = 15
"""Staleness from which on all groups share one column."""
OPTIONS: Any = {"svg.fonttype": "none", "svg.hashsalt": "staleflow", "font.size": 8, "axes.titlesize": 9}
IDLE, BUSY, LOADING, TRAINING = (1.0, 1.0, 1.0), (0.12, 0.35, 0.65), (0.95, 0.55, 0.1), (0.2, 0.6, 0.3)


def plot(results: Sequence[Result], bound: int, stem: Path) -> list[Path]:
    """Write ``stem``.png, and ``stem``.html with the table too, which loads no external resources.

    ``bound`` is in versions and marked in the picture. Raises ``ConfigError`` without matplotlib.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError("plot", str(stem), f"it needs matplotlib: {install('plot')}") from error
    matplotlib.use("Agg")
    stem.parent.mkdir(parents=True, exist_ok=True)
    image, html, vector = stem.with_name(f"{stem.name}.png"), stem.with_name(f"{stem.name}.html"), io.StringIO()
    with matplotlib.rc_context(OPTIONS):
        from matplotlib import pyplot

        figure = _figure(results, bound)
        figure.savefig(image, dpi=120)
        figure.set_layout_engine("none")  # the layout is final; computing it again would be as slow as the first time
        figure.savefig(vector, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
        pyplot.close(figure)
    text = vector.getvalue()
    html.write_text(page(results, text[text.index("<svg") :]), encoding="utf-8")
    return [image, html]


def _figure(results: Sequence[Result], bound: int) -> Any:
    from matplotlib import pyplot

    columns = 1 if len(results) < 4 else 2
    rows = -(-len(results) // columns)
    top = 2.0 + 0.2 * len(results)
    figure: Any = pyplot.figure(figsize=(13, top + 1.5 * rows), layout="constrained")
    upper, lower = figure.subfigures(2, 1, height_ratios=[top, 1.5 * rows])
    lengths, ages = upper.subplots(1, 2)
    _lengths(lengths, results)
    _ages(ages, results, bound)
    window_s = _window_s(results)
    panels = lower.subplots(rows, columns, squeeze=False, sharex=True)
    for panel, result in zip(panels.flat, results, strict=False):
        _lanes(panel, result, window_s)
    for panel in panels.flat[len(results) :]:
        panel.axis("off")
    _legend(lower)
    return figure


def _lengths(axis: Any, results: Sequence[Result]) -> None:
    """Plot the drawn lengths, and the trained lengths of runs that prefer some lengths."""
    drawn = results[0].drawn
    if not drawn:
        return
    bins = np.geomspace(max(min(drawn), 1), max(drawn) + 1, 40)
    weights = np.full(len(drawn), 1 / len(drawn))
    axis.hist(drawn, bins=bins, weights=weights, color="0.8", label="drawn")
    for result in results:
        if result.trained and (len(results) == 1 or abs(result.length_bias - 1) > 0.02):
            share = np.full(len(result.trained), 1 / len(result.trained))
            axis.hist(result.trained, bins=bins, weights=share, histtype="step", label=f"trained, {result.name}")
    axis.set(xscale="log", xlabel="tokens of a trajectory", ylabel="share of trajectories", title="Lengths")
    axis.legend(fontsize=7)


def _ages(axis: Any, results: Sequence[Result], bound: int) -> None:
    """Plot one row per run: share of trained groups at each staleness; a line at the bound."""
    oldest = min(max([*(result.staleness_max for result in results), bound + 1]), MAX_AGE)
    shares = np.zeros((len(results), oldest + 1))
    for row, result in enumerate(results):
        for age, count in result.ages.items():
            shares[row, min(age, oldest)] += count / sum(result.ages.values())
    axis.imshow(shares, cmap="Blues", vmin=0, vmax=1, aspect="auto", interpolation="nearest")
    for (row, age), share in np.ndenumerate(shares):
        if share:
            colour = "white" if share > 0.6 else "black"
            axis.text(age, row, _percent(share), ha="center", va="center", fontsize=6, color=colour)
    axis.axvline(bound + 0.5, color="tab:red", linewidth=1.5)
    names = [str(age) for age in range(oldest)] + [f"{oldest}" if oldest < MAX_AGE else f"{oldest}+"]
    axis.set(xticks=range(oldest + 1), xticklabels=names, yticks=range(len(results)))
    axis.set_yticklabels([result.name for result in results])
    axis.set(xlabel="versions", title=f"Staleness of trained groups in %; the bound is {bound}")


def _percent(share: float) -> str:
    return f"{100 * share:.0f}" if share >= 0.01 else "<1"


def _window_s(results: Sequence[Result]) -> float:
    """Return the time from the start that every run covers, limited to ``STEPS`` steps."""
    steps_s = [result.seconds / len(result.steps) for result in results if result.steps]
    return min(*(result.seconds for result in results), STEPS * min(steps_s, default=1.0), float("inf")) or 1.0


def _lanes(axis: Any, result: Result, window_s: float) -> None:
    """Plot one lane per engine, darker where more samples run, and the trainer below."""
    edges = np.linspace(0, window_s, MOMENTS + 1)
    shown = result.engines[:MAX_LANES]
    picture = np.ones((len(shown) + 1, MOMENTS, 3))
    most = max((count for engine in shown for _, count in engine.running), default=1) or 1
    for row, engine in enumerate(shown):
        share = _mean(engine.running, edges, min(engine.ended_s, window_s)) / most
        _paint(picture[row], BUSY, np.where(share > 0, 0.3 + 0.7 * share, 0))
        _paint(picture[row], LOADING, _loading(engine, edges))
    busy = [(moment, count) for step in result.steps for moment, count in ((step.began_s, 1), (step.ended_s, 0))]
    _paint(picture[-1], TRAINING, _mean(busy, edges, window_s))
    axis.imshow(picture, aspect="auto", interpolation="nearest", extent=(0, window_s, len(shown) + 1, 0))
    axis.axhline(len(shown), color="0.5", linewidth=0.5)
    every = max(1, len(shown) // 8)
    axis.set_yticks([row + 0.5 for row in range(0, len(shown), every)] + [len(shown) + 0.5])
    axis.set_yticklabels([str(row) for row in range(0, len(shown), every)] + ["trainer"], fontsize=6)
    left_out = f"; {len(shown)} of {len(result.engines)} engines" if len(shown) < len(result.engines) else ""
    axis.set_title(f"{result.name}: {result.steps_per_min:.2f} steps/min{left_out}", loc="left")
    axis.set_xlabel("seconds", labelpad=0)
    axis.label_outer()


def _mean(changes: Sequence[tuple[float, int]], edges: Any, until_s: float) -> Any:
    """Return the mean count between each two edges, of a count that changes at each moment and ends at ``until_s``."""
    counted = [(moment, count) for moment, count in changes if moment < until_s]
    moments = np.array([0.0, *(moment for moment, _ in counted), until_s])
    counts = np.array([0.0, *(count for _, count in counted)])
    total = np.concatenate([[0.0], np.cumsum(counts * np.diff(moments))])
    return np.diff(np.interp(edges, moments, total)) / np.diff(edges)


def _loading(engine: EngineRow, edges: Any) -> Any:
    """Return 1 where the engine loads weights, for at least one moment per load."""
    shown = np.zeros(len(edges) - 1)
    for begin_s, end_s, _ in engine.loads:
        if begin_s < edges[-1]:
            first, last = np.searchsorted(edges, (begin_s, end_s), side="right") - 1
            shown[first : last + 1] = 1
    return shown


def _paint(lane: Any, colour: tuple[float, float, float], strength: Any) -> None:
    lane += strength[:, None] * (np.array(colour) - lane)


def _legend(figure: Any) -> None:
    from matplotlib.patches import Patch

    kinds = (
        ("generates (darker: more samples)", BUSY),
        ("loads weights", LOADING),
        ("idle", IDLE),
        ("trains", TRAINING),
    )
    patches = [Patch(facecolor=colour, edgecolor="0.6", label=name) for name, colour in kinds]
    figure.legend(handles=patches, loc="outside upper center", ncols=len(patches), fontsize=8, frameon=False)


def page(results: Sequence[Result], picture: str) -> str:
    """Return the page. ``picture``: an svg element, inserted unescaped."""
    environment = Environment(loader=PackageLoader("staleflow.sim", "."), autoescape=True, undefined=StrictUndefined)
    return environment.get_template("page.html").render(
        title="Simulated runs" if len(results) > 1 else f"{results[0].name}, simulated",
        columns=[name for name, _ in COLUMNS],
        rows=[(result, [text(result) for _, text in COLUMNS]) for result in results],
        conclusion=conclusion(results) if len(results) > 1 else [],
        legend=LEGEND,
        picture=Markup(picture),
    )
