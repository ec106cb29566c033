"""The result table of ``staleflow simulate --compare``."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from staleflow.sim.result import Result

WIDTH = 120
"""Line width in characters if stdout is not a terminal."""


def gather(results: "Iterable[Result]", total: int, quiet: bool) -> "list[Result]":
    """Return ``results`` as a list and show a progress bar of ``total`` meanwhile, unless ``quiet``."""
    from staleflow.cli.progress import bar

    finished: list[Result] = []
    with bar("simulating", quiet=quiet) as update:
        for result in results:
            finished.append(result)
            update(len(finished), total, f"last {result.name}: {result.steps_per_min:.3f} steps/min")
    return finished


def show(results: "list[Result]", title: str) -> None:
    """Print the table, a legend and a conclusion. On a narrow terminal some columns follow below the others."""
    from rich.console import Console
    from rich.text import Text

    from staleflow.sim.compare import COLUMNS
    from staleflow.sim.conclusion import LEGEND, conclusion

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = WIDTH
    columns = [(name, [Text(text(result), style=_style(name, result)) for result in results]) for name, text in COLUMNS]
    names = [result.name for result in results]
    console.print(Text(title, style="italic"), soft_wrap=True)
    wide = console.options.update(width=10 * WIDTH)
    while columns:
        fitting = len(columns)
        while fitting > 1 and console.measure(_table(names, columns[:fitting]), options=wide).maximum > console.width:
            fitting -= 1
        console.print(_table(names, columns[:fitting]))
        columns = columns[fitting:]
        console.print()
    for line in LEGEND:
        console.print(Text(line, style="dim"))
    console.print()
    for sentence in conclusion(results):
        console.print(Text(sentence))


def _table(names: "list[str]", columns: "list[tuple[str, list[Text]]]") -> "Table":
    """Return a table of all rows and the given columns. Columns never wrap, so that no number is cut."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 0, 0, 2))
    table.add_column("", no_wrap=True)
    for title, _ in columns:
        table.add_column(title.replace(" ", "\n"), justify="right", no_wrap=True)
    for name, *cells in zip(names, *(cells for _, cells in columns), strict=True):
        table.add_row(name, *cells)
    return table


def _style(name: str, result: "Result") -> str:
    return "bold red" if name == "violations" and result.violations else ""
