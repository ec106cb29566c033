"""Charts as SVG paths that scale to any width. No IO.

A drawing is 1000 x 1000 units and is stretched to its box; what is written stands beside it in HTML, so that it is as
large on a phone as on a wall.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from staleflow.monitor.words import clock

SIDE = 1000
MAX_POINTS = 400
"""Maximum points of a curve; beyond it, neighbours are averaged."""
NOISY = 60
"""Minimum points from which a curve is drawn smoothed, with the raw curve faintly behind it."""
SECONDS = "second"
"""Unit of an x axis that shows time."""
Values = Sequence[float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """One shape; ``kind`` and ``colour`` are CSS classes."""

    kind: str
    colour: str
    d: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Label at a position of the axis in percent."""

    at: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Values at the x positions of a chart."""

    name: str
    colour: str
    values: Values
    exact: bool = False
    """True for maxima: neighbours are merged by their maximum, and the curve is never smoothed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Everything that the page needs for one chart."""

    title: str
    unit: str
    x_unit: str
    paths: list[Path]
    x_ticks: list[Tick]
    y_ticks: list[Tick]
    legend: list[tuple[str, str]]
    """(colour, name); empty for a single curve."""
    latest: str = ""
    hover: dict[str, object] = field(default_factory=dict[str, object])
    """Data of the tooltip: x positions, and values by series."""
    level: tuple[float, str] | None = None
    """Horizontal line: position in percent of the height, and label."""
    low: float = 0.0
    high: float = 1.0
    """Labels of the x axis at both ends."""
    meaning: str = ""
    """Explanation of the title; may be empty."""
    whole: bool = False
    """True for a chart of full page width."""


def lines(
    title: str,
    places: Sequence[float],
    series: Sequence[Series],
    *,
    unit: str = "",
    x_unit: str = "step",
    level: tuple[float, str] | None = None,
    from_zero: bool = False,
    meaning: str = "",
    whole: bool = False,
) -> Chart:
    """Return a line chart. ``level``: a value to mark with a horizontal line, and its label."""
    shown = [one for one in series if any(value is not None for value in one.values)]
    xs, thinned = _thin(places, shown)
    drawn = [value for values in thinned for value in values if value is not None]
    marked = [level[0]] if level else []
    low, high = _range([*drawn, *marked, *([0.0] if from_zero else [])])
    ticks = _ticks(low, high)
    low, high = min(low, ticks[0]), max(high, ticks[-1])
    if level is not None and level[0] == high:
        high += (high - low) / 6  # a line at the very edge would be invisible
    span = _span(xs)
    paths = list[Path]()
    for one, values in zip(shown, thinned, strict=True):
        points = [(x, value) for x, value in zip(xs, values, strict=True) if value is not None]
        noisy = len(points) >= NOISY
        if noisy and not one.exact:
            paths.append(Path(kind="faint", colour=one.colour, d=_line(points, span, (low, high))))
            points = _smooth(points, max(len(points) // 25, 3))
        kind = "thin" if noisy and one.exact else "line"
        paths.append(Path(kind=kind, colour=one.colour, d=_line(points, span, (low, high))))
    return Chart(
        title=title,
        unit=unit,
        x_unit=x_unit,
        paths=paths,
        x_ticks=time_ticks(span) if x_unit == SECONDS else _x_ticks(span),
        y_ticks=[
            Tick(100 * (tick - low) / (high - low), word) for tick, word in zip(ticks, _labels(ticks), strict=True)
        ],
        legend=[(one.colour, one.name) for one in shown] if len(shown) > 1 else [],
        latest=_latest(shown[0].values) if len(shown) == 1 else "",
        hover=_hover(xs, shown, thinned),
        level=None if level is None else (100 * (level[0] - low) / (high - low), level[1]),
        low=span[0],
        high=span[1],
        meaning=meaning,
        whole=whole,
    )


def stack(
    title: str,
    places: Sequence[float],
    series: Sequence[Series],
    *,
    unit: str = "",
    x_unit: str = "step",
    whole: bool = False,
) -> Chart:
    """Return a stacked area chart, first series at the bottom; each position extends half-way to its neighbours."""
    xs, thinned = _thin(places, series)
    rows = [[value or 0.0 for value in values] for values in thinned]
    high = max((sum(column) for column in zip(*rows, strict=True)), default=0.0) or 1.0
    ticks = _ticks(0.0, high)
    high = max(high, ticks[-1])
    span, edges = _span(xs, bars=True), _edges(xs)
    below = [0.0] * len(xs)
    paths = list[Path]()
    for one, row in zip(series, rows, strict=True):
        top = [base + value for base, value in zip(below, row, strict=True)]
        paths.append(Path(kind="area", colour=one.colour, d=_area(edges, below, top, span, high)))
        below = top
    return Chart(
        title=title,
        unit=unit,
        x_unit=x_unit,
        paths=paths,
        x_ticks=time_ticks(span) if x_unit == SECONDS else _x_ticks(span),
        y_ticks=[Tick(100 * tick / high, word) for tick, word in zip(ticks, _labels(ticks), strict=True)],
        legend=[(one.colour, one.name) for one in series],
        hover=_hover(xs, series, thinned),
        low=span[0],
        high=span[1],
        whole=whole,
    )


def number(value: float, digits: int = 3) -> str:
    """Format a number briefly: 1.2k, 0.05, 3M."""
    size = abs(value)
    if size >= 1e4:
        for limit, word in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
            if size >= limit:
                return f"{value / limit:.{digits}g}{word}"
    if value == int(value):
        return str(int(value))
    if size < 1e-3:
        return f"{value:.{digits - 2}e}".replace("e-0", "e-")
    return f"{value:.{digits}g}" if size < 1000 or digits > 3 else f"{value:.0f}"


def time_ticks(window_s: tuple[float, float], most: int = 7) -> list[Tick]:
    """Return round clock times as ticks, at most ``most``."""
    low, high = window_s
    length = max(high - low, 1e-6)
    rounds = (0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400)
    step = next((size for size in rounds if length / size <= most), 86400 * max(round(length / 86400 / 6), 1))
    first = int(-(-low // step))
    moments = [index * step for index in range(first, int(high // step) + 1)]
    return [Tick(100 * (at - low) / length, clock(at) if step >= 1 else f"{at:.1f}") for at in moments]


def _labels(ticks: Sequence[float]) -> list[str]:
    """Format ticks with the fewest digits that keep them distinct."""
    return next(
        (words for digits in range(3, 13) if len({*(words := [number(tick, digits) for tick in ticks])}) == len(ticks)),
        [str(tick) for tick in ticks],
    )


def _thin(places: Sequence[float], series: Sequence[Series]) -> tuple[list[float], list[list[float | None]]]:
    """Reduce to at most ``MAX_POINTS`` positions by averaging neighbours; values that are not numbers are skipped."""
    width = -(-len(places) // MAX_POINTS) or 1
    starts = range(0, len(places), width)
    xs = [sum(places[at : at + width]) / len(places[at : at + width]) for at in starts]
    return xs, [[_one(one.values[at : at + width], exact=one.exact) for at in starts] for one in series]


def _one(values: Values, *, exact: bool) -> float | None:
    """Return the value that represents several neighbours."""
    finite = [value for value in values if value is not None and math.isfinite(value)]
    if not finite:
        return None
    return max(finite) if exact else sum(finite) / len(finite)


def _range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values, default=0.0), max(values, default=1.0)
    if high - low < 1e-12 * max(abs(high), 1e-300) or high == low:
        room = abs(high) / 2 or 0.5
        return low - room, high + room
    return low, high


def _ticks(low: float, high: float) -> list[float]:
    """Return about three to five round numbers that enclose the range."""
    rough = (high - low) / 3
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(times * power for times in (1, 2, 2.5, 5, 10) if times * power >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def _span(xs: Sequence[float], *, bars: bool = False) -> tuple[float, float]:
    if not xs:
        return 0.0, 1.0
    edges = _edges(xs)
    low, high = (edges[0], edges[-1]) if bars else (min(xs), max(xs))
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _edges(xs: Sequence[float]) -> list[float]:
    """Return the midpoints between neighbours, extended by the same distance beyond the outer ones."""
    if len(xs) < 2:
        return [x + side for x in xs for side in (-0.5, 0.5)]
    inner = [(left + right) / 2 for left, right in pairwise(xs)]
    return [xs[0] - (inner[0] - xs[0]), *inner, xs[-1] + (xs[-1] - inner[-1])]


def _x_ticks(span: tuple[float, float]) -> list[Tick]:
    low, high = span
    inside = [tick for tick in _ticks(low, high) if low <= tick <= high]
    return [Tick(100 * (tick - low) / (high - low), word) for tick, word in zip(inside, _labels(inside), strict=True)]


def _smooth(points: Sequence[tuple[float, float]], width: int) -> list[tuple[float, float]]:
    """Return the moving average over ``width`` points."""
    values = [value for _, value in points]
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    result = list[tuple[float, float]]()
    for at, (x, _) in enumerate(points):
        reach = min(width // 2, at, len(points) - 1 - at)
        result.append((x, (sums[at + reach + 1] - sums[at - reach]) / (2 * reach + 1)))
    return result


def _place(x: float, y: float, span: tuple[float, float], height: tuple[float, float]) -> str:
    across = SIDE * (x - span[0]) / (span[1] - span[0])
    up = SIDE - SIDE * (y - height[0]) / (height[1] - height[0])
    return f"{across:.1f} {up:.1f}"


def _line(points: Sequence[tuple[float, float]], span: tuple[float, float], height: tuple[float, float]) -> str:
    if not points:
        return ""
    if len(points) == 1:  # a single point has no length: draw a short dash
        (x, y), reach = points[0], (span[1] - span[0]) / 100
        points = [(x - reach, y), (x + reach, y)]
    return "M" + "L".join(_place(x, y, span, height) for x, y in points)


def _area(
    edges: Sequence[float], below: Sequence[float], top: Sequence[float], span: tuple[float, float], high: float
) -> str:
    if not top:
        return ""
    upper = [(edges[at + side], value) for at, value in enumerate(top) for side in (0, 1)]
    lower = [(edges[at + side], value) for at, value in enumerate(below) for side in (0, 1)]
    return "M" + "L".join(_place(x, y, span, (0.0, high)) for x, y in [*upper, *reversed(lower)]) + "Z"


def _latest(values: Values) -> str:
    measured = [value for value in values if value is not None]
    return number(measured[-1]) if measured else ""


def _hover(xs: Sequence[float], series: Sequence[Series], rows: Sequence[Sequence[float | None]]) -> dict[str, object]:
    return {
        "x": [float(f"{x:.6g}") for x in xs],
        "y": [
            {"name": one.name, "colour": one.colour, "v": [None if v is None else float(f"{v:.4g}") for v in row]}
            for one, row in zip(series, rows, strict=True)
        ],
    }
