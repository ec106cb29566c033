"""Progress bar on stderr that names the current measurement, if stderr is a terminal.

The bar is drawn only between two measurements, so that it never runs beside one.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

T = TypeVar("T")


def tracked(what: str, items: Iterable[T], name: Callable[[T], object] = str) -> Iterator[T]:
    """The items, with a bar that names the current one and disappears at the end."""
    todo, console = list(items), Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[now]}"))
    shows = Progress(
        *columns,
        console=console,
        transient=True,
        auto_refresh=False,
        redirect_stdout=sys.stdout.isatty(),  # redirected output stays in its file
        disable=not console.is_terminal,
    )
    with shows as progress:
        task = progress.add_task(what, total=len(todo), now="")
        for done, item in enumerate(todo):
            progress.update(task, completed=done, now=str(name(item)))
            progress.refresh()
            yield item
