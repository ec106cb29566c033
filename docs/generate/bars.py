"""Bar charts of the tables in ``docs/results.md``, so that a picture cannot differ from its table."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from docs.generate.svg import box, picture, words

PAGE: Final = Path(__file__).parent.parent / "results.md"
LABEL, WIDTH, ROW = 300, 640, 22
"""Width of the labels, of the picture, and the height of a bar with its gap, in pixels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Columns of the first table below a heading. Rows without a number in them are left out."""

    heading: str
    columns: tuple[str, ...]
    title: str
    labels: int = 1
    """Number of first columns that name a row."""


CHARTS: Final = {
    "results-staleflow": Chart(
        heading="Throughput at equal bounds", columns=("η 1",), title="Steps per minute at a bound of one version"
    ),
    "results-streamrl": Chart(
        heading="Streaming",
        columns=("batch by batch, steps/min", "streamed, steps/min"),
        title="Steps per minute",
        labels=2,
    ),
    "results-distflow": Chart(
        heading="Trajectories through the service", columns=("trajectories/s",), title="Trajectories per second"
    ),
    "results-learning": Chart(
        heading="Learning under staleness: SmolLM2",
        columns=("final score",),
        title="Final held-out score",
        labels=2,
    ),
    "results-real": Chart(
        heading="Time to a reward, beside TRL", columns=("TRL, s", "staleflow, s"), title="Seconds to the reward"
    ),
}


def charts() -> dict[str, str]:
    """Return each chart by its name."""
    page = PAGE.read_text()
    return {name: bars(chart, table(page, chart.heading)) for name, chart in CHARTS.items()}


def table(page: str, heading: str) -> list[list[str]]:
    """Return the rows of the first table below a heading; the first row has the titles."""
    _, found, below = page.partition(f"\n### {heading}\n")
    if not found:
        raise ValueError(f"docs/results.md has no heading {heading!r}; docs/generate/bars.py draws the table below it")
    lines = re.findall(r"(?:^\|.*\n)+", below, re.MULTILINE)[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in (lines[0], *lines[2:])]


def bars(chart: Chart, rows: Sequence[Sequence[str]]) -> str:
    """Draw one bar for each row and column; the longest is as wide as there is room."""
    titles, *body = rows
    places = [titles.index(column) for column in chart.columns]
    drawn = [
        (" ".join(row[: chart.labels]), [number(row[place]) for place in places])
        for row in body
        if all(number(row[place]) is not None for place in places)
    ]
    largest = max(value for _, values in drawn for value in values if value is not None)
    parts = list(_parts(chart, drawn, largest))
    height = 44 + ROW * len(drawn) * len(places) + 6 * len(drawn)
    return picture(WIDTH, height, parts, f"{chart.title}: {', '.join(label for label, _ in drawn)}")


def number(cell: str) -> float | None:
    """Return the number of a cell, or None."""
    plain = cell.replace(",", "").replace("*", "")
    return float(plain) if re.fullmatch(r"\d+(\.\d+)?", plain) else None


def _parts(chart: Chart, drawn: Sequence[tuple[str, Sequence[float | None]]], largest: float) -> Iterator[str]:
    yield words(8, 20, chart.title, "bold")
    if len(chart.columns) > 1:
        x = float(LABEL)
        for place, column in enumerate(chart.columns):
            yield box(x, 10, 12, 12, f"v{place}")
            yield words(x + 18, 20, column.partition(",")[0], "small")
            x += 30 + 7 * len(column)
    y = 34.0
    for label, values in drawn:
        yield words(LABEL - 10, y + ROW * len(values) / 2 + 2, label, "end")
        for place, value in enumerate(values):
            assert value is not None
            width = max(1.0, (WIDTH - LABEL - 70) * value / largest)
            yield box(LABEL, y, round(width, 1), ROW - 4, f"v{place}")
            yield words(LABEL + round(width, 1) + 6, y + ROW - 9, f"{value:,g}", "small")
            y += ROW
        y += 6
