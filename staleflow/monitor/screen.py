"""The live view: one screen of 80 x 24, redrawn in place."""

import time
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from staleflow.monitor.ending import print_summary
from staleflow.monitor.model import Board, History, RoleRow, WindowRow, board
from staleflow.monitor.words import INSECURE, clock, curve, meter, number, whole
from staleflow.supervisor.summary import Summary
from staleflow.supervisor.view import Snapshot

REFRESH_S = 0.25
MOST_ROLES = 9
MOST_STEPS = 4
"""Rows of the window."""


class LiveView:
    """Shows a run on a terminal."""

    def __init__(self, name: str, run_dir: Path, console: Console | None = None) -> None:
        self._name = name
        self._footer = f"{run_dir}    Ctrl-C ends it; nothing is lost"
        self._console = console or Console(highlight=False)
        self._live = Live(console=self._console, auto_refresh=False, transient=True, vertical_overflow="crop")
        self._history = History()
        self._shown_at = 0.0

    def start(self) -> None:
        self._live.start()

    def show(self, snapshot: Snapshot) -> None:
        self._history.see(snapshot)
        now = time.monotonic()
        if now - self._shown_at < REFRESH_S:
            return
        self._shown_at = now
        screen = render(board(self._name, snapshot, self._history), self._footer, self._console.width)
        self._live.update(screen, refresh=True)

    def say(self, text: str) -> None:
        self._console.print(Text(text, style="yellow"), soft_wrap=True)

    def stop(self) -> None:
        self._live.stop()

    def summary(self, summary: Summary) -> None:
        print_summary(summary, self._console)


def render(it: Board, footer: str, width: int = 80) -> RenderableType:
    """The whole screen."""
    parts: list[RenderableType] = [_title(it, width), Text()]
    if it.steps:
        parts += [_numbers(it, width), Text()]
    parts.append(_roles(it.roles))
    if it.insecure:
        parts += [Text(), Text(INSECURE, style="bold red", overflow="ellipsis", no_wrap=True)]
    if it.why:
        parts += [Text(), Text(f"why  {it.why}", style="yellow", overflow="ellipsis")]
    if footer:
        parts += [Text(), Text(footer, style="dim", overflow="ellipsis", no_wrap=True)]
    return Group(*parts)


def _title(it: Board, width: int) -> Table:
    grid = Table.grid(expand=True)
    grid.width = min(width, 100)
    grid.add_column()
    grid.add_column(justify="right")
    grid.add_row(Text.assemble(("staleflow ", "bold cyan"), (it.name, "bold")), f"{it.phase}  {clock(it.elapsed_s)}")
    return grid


def _numbers(it: Board, width: int) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True, min_width=9)
    grid.add_column(no_wrap=True)
    grid.add_row("step", _progress(it, width))
    grid.add_row("reward", _reward(it))
    grid.add_row("staleness", _staleness(it))
    rates = f"{whole(it.trained_per_s)} trained   {whole(it.generated_per_s)} generated"
    grid.add_row("tokens/s", Text(rates))
    grid.add_row("groups", Text("   ".join(f"{count:,} {state}" for state, count in it.groups)))
    for index, row in enumerate(it.window[:MOST_STEPS]):
        grid.add_row("" if index else "window", _window(row, it.batch_size))
    return grid


def _progress(it: Board, width: int) -> Table:
    left = "" if it.left_s is None else f"{clock(it.left_s)} left"
    grid = Table.grid(padding=(0, 2))
    bar = ProgressBar(total=max(it.steps, 1), completed=it.step, width=max(min(width, 100) - 46, 10))
    grid.add_row(f"{it.step:,} of {it.steps:,}", bar, left)
    return grid


def _reward(it: Board) -> Text:
    text = Text.assemble((number(it.reward), "bold"), "  ", (curve(it.rewards, 24), "green"))
    if it.held_out:
        first, last = it.held_out
        text.append(f"   held-out {number(first)} → ")
        text.append(number(last), style="bold green")
    return text


def _staleness(it: Board) -> Text:
    text = Text.assemble(
        f"mean {number(it.staleness_mean)}   max {whole(it.staleness_max)}   bound {whole(it.bound)}   ",
        (f"{it.violations} violations", "bold red" if it.violations else "green"),
    )
    if it.bound_of == "token":
        text.append("   (every trained token)")
    return text


def _window(row: WindowRow, batch_size: int) -> Text:
    width = 24
    occupied, pushed, leased = meter((row.occupied, row.pushed, row.leased), batch_size, width)
    empty = width - occupied - pushed - leased
    text = Text.assemble(
        f"by step {row.deadline:<5} ",
        ("█" * occupied, "green"),
        ("▓" * pushed, "cyan"),
        ("▒" * leased, "blue"),
        ("·" * empty, "dim"),
    )
    text.append(f" {row.occupied} ready  {row.pushed} staged  {row.leased} leased")
    return text


def _roles(rows: tuple[RoleRow, ...]) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(no_wrap=True)
    grid.add_column(no_wrap=True, style="yellow")
    for row in rows[:MOST_ROLES]:
        again = f"restarted {row.restarts}x" if row.restarts else ""
        grid.add_row(row.name, Text(row.doing, style="" if row.good else "bold red"), again)
    if len(rows) > MOST_ROLES:
        grid.add_row("", Text(f"and {len(rows) - MOST_ROLES} more", style="dim"), "")
    return grid
