# pyright: basic, reportMissingImports=false
"""The picture of ``staleflow trace plot``. matplotlib is the extra ``plot``."""

from collections.abc import Sequence
from pathlib import Path

from staleflow.configs.errors import ConfigError
from staleflow.monitor.lanes import Lane

MOST_LANES = 64
COLOURS = ("tab:orange", "tab:green", "tab:purple", "tab:red", "tab:olive", "tab:cyan", "tab:pink", "tab:brown")


def plot(shown: Sequence[Lane], path: Path, *, window_s: tuple[float, float]) -> None:
    """Write ``path``, one lane a worker, a bar a piece of work. ``ConfigError`` without matplotlib."""
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError("plot", str(path), "it needs matplotlib: pip install 'staleflow[plot]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawn = list(shown)[:MOST_LANES]
    stages = [kind for kind in dict.fromkeys(lane.kind for lane in drawn) if kind not in ("engine", "trainer")]
    colours = {"engine": "tab:blue", "trainer": "0.4"}
    colours |= {stage: COLOURS[number % len(COLOURS)] for number, stage in enumerate(stages)}
    figure, axis = pyplot.subplots(figsize=(13, 1.2 + 0.3 * len(drawn)), layout="constrained")
    for row, lane in enumerate(drawn):
        bars = [(span.begin_s, span.end_s - span.begin_s) for span in lane.spans]
        alpha = 0.15 if lane.kind == "engine" else 0.7  # an engine writes several groups at once: darker is more
        axis.broken_barh(bars, (row + 0.1, 0.8), facecolors=colours[lane.kind], alpha=alpha)
    axis.set(xlim=window_s, ylim=(len(drawn), 0), xlabel="seconds")
    axis.set_yticks([row + 0.5 for row in range(len(drawn))])
    axis.set_yticklabels([lane.worker for lane in drawn], fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
