# pyright: basic, reportMissingImports=false
"""Picture of the comparison: trained tokens a minute of all systems over the synchronous loop, one panel a shape."""

from collections.abc import Sequence
from pathlib import Path

from bench.papers_points import OWN, Point, loses_nothing, oldest, ratio
from staleflow.sim.peers.presets import PEERS

INK = "#808080"
"""Text and axes: readable on white and on black."""
OURS, THEIRS = "#e4572e", "#4c8dd6"


def draw(points: Sequence[Point], path: Path) -> None:
    """Write an SVG with a transparent background. Filled: keeps the bound and loses nothing; hollow: does not."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams |= {
        "svg.hashsalt": "staleflow",
        "svg.fonttype": "none",
        "font.size": 8,
        "text.color": INK,
        "axes.labelcolor": INK,
        "axes.edgecolor": INK,
        "xtick.color": INK,
        "ytick.color": INK,
    }
    from matplotlib import pyplot

    names = [*OWN, *PEERS]
    figure, axes = pyplot.subplots(
        1, len(points), figsize=(2.1 * len(points) + 1.2, 3.6), sharey=True, squeeze=False, layout="constrained"
    )
    for axis, point in zip(axes[0], points, strict=True):
        for row, (name, outcomes) in enumerate(point.systems().items()):
            speed = ratio(outcomes, point.peers["sync"])
            fair = oldest(outcomes) <= point.eta and loses_nothing(outcomes)
            colour = OURS if name in OWN else THEIRS
            axis.errorbar(
                speed.value,
                row,
                xerr=speed.half,
                fmt="o",
                markersize=5,
                color=colour,
                markerfacecolor=colour if fair else "none",
                elinewidth=0.8,
            )
        axis.set_title(point.shape.name, fontsize=8)
        axis.grid(axis="x", color=INK, alpha=0.3, linewidth=0.5)
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_yticks(range(len(names)), names)
        axis.set_xlim(left=0)
    axes[0][0].invert_yaxis()
    figure.supxlabel(f"trained tokens a minute over the synchronous loop; η {points[0].eta}", fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, transparent=True, metadata={"Date": None})
    pyplot.close(figure)
