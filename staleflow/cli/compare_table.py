"""The table of ``staleflow simulate --compare``, a row at a time."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from staleflow.sim.result import Result

WIDTH = 120
"""Characters a line where nobody looks at a terminal."""


def gather(results: "Iterable[Result]", quiet: bool) -> "list[Result]":
    """All of them; says on the way which one is simulated, unless ``quiet``."""
    from rich.console import Console

    console = Console(stderr=True, quiet=quiet)
    done: list[Result] = []
    with console.status("simulating ...") as status:
        for result in results:
            done.append(result)
            status.update(f"simulating ... {len(done)} done, last {result.name}: {result.steps_per_min:.3f} steps/min")
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
