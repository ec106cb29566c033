"""The table of ``staleflow simulate --compare``, a row at a time."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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
    """Print the table."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from staleflow.sim.compare import COLUMNS, NOTE

    table = Table(box=None, title=title, pad_edge=False, padding=(0, 0, 0, 2))
    table.add_column("", no_wrap=True)
    for name, _ in COLUMNS:
        table.add_column(name.replace(" ", "\n"), justify="right", no_wrap=True)
    for result in results:
        cells = [Text(text(result), style=_style(name, result)) for name, text in COLUMNS]
        table.add_row(result.name, *cells)
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = WIDTH
    console.print(table)
    console.print(NOTE, style="dim")


def _style(name: str, result: "Result") -> str:
    return "bold red" if name == "violations" and result.violations else ""
