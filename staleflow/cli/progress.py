"""A bar on stderr for whatever takes longer than two seconds; nothing where nobody looks at a terminal."""

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager

Told = Callable[[float, float, str], None]
"""Hears how much is done, of how much, and what was last."""


@contextmanager
def bar(what: str, *, quiet: bool = False) -> Generator[Told]:
    """Shows a bar until the block ends, and leaves nothing behind. ``quiet``: none at all."""
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
        redirect_stdout=sys.stdout.isatty(),  # what goes to a file stays there
        disable=quiet or not console.is_terminal,
    )
    with shows as progress:
        task = progress.add_task(what, total=None, last="")

        def tell(done: float, total: float, last: str) -> None:
            progress.update(task, completed=done, total=total, last=last)

        yield tell


@contextmanager
def working(what: str) -> Generator[None]:
    """Says that something happens whose end nobody knows; on a terminal only, and gone afterwards."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(what):
        yield
