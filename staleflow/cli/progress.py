"""Progress bars and spinners on stderr; nothing is printed if stderr is not a terminal."""

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager

Update = Callable[[float, float, str], None]
"""Callback that receives the completed amount, the total and a text about the latest item."""


@contextmanager
def bar(what: str, *, quiet: bool = False) -> Generator[Update]:
    """Show a progress bar until the block ends, then erase it. ``quiet`` disables it."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TimeRemainingColumn(compact=True),
        TextColumn("{task.fields[last]}"),
    )
    shows = Progress(
        *columns,
        console=console,
        transient=True,
        redirect_stdout=sys.stdout.isatty(),  # keep output to a file unchanged
        disable=quiet or not console.is_terminal,
    )
    with shows as progress:
        task = progress.add_task(what, total=None, last="")

        def update(completed: float, total: float, last: str) -> None:
            progress.update(task, completed=completed, total=total, last=last)

        yield update


@contextmanager
def working(what: str) -> Generator[None]:
    """Show a spinner for work of unknown length until the block ends, then erase it."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(what):
        yield
