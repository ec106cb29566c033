"""The table of ``staleflow simulate --compare``, a row at a time."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from staleflow.sim.result import Result

WIDTH = 120
"""Characters a line where nobody looks at a terminal."""


def gather(results: "Iterable[Result]", total: int, quiet: bool) -> "list[Result]":
    """All of them; a bar on the way says how many of ``total`` are done, unless ``quiet``."""
    from staleflow.cli.progress import bar

    done: list[Result] = []
    with bar("simulating", quiet=quiet) as tell:
        for result in results:
            done.append(result)
            tell(len(done), total, f"last {result.name}: {result.steps_per_min:.3f} steps/min")
    return done


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
    """Every row, with some of its columns; as wide as its words, for a number must not be cut."""
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
