"""Panels that are lists: engines, groups that pin, stages, versions, events, processes; a story; the help.

A list that does not fit is scrolled so that the chosen row is on the screen; the filter leaves rows with its text.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from staleflow.monitor.look import ENDS_RUN, HELP, LEAVES, Look, is_number, shown
from staleflow.monitor.model import Board
from staleflow.monitor.panels import TONES
from staleflow.monitor.roles import SILENCE_TIMEOUT_S, RoleRow
from staleflow.monitor.rows import EventRow, InstanceRow, PinRow, StageRow, VersionRow
from staleflow.monitor.story import Chapter
from staleflow.monitor.words import amount, bar, curve, percent, plural, short, span

WIDE, ROOMY = 100, 66
"""Minimum cells for additional columns: of engines, and of versions and engines."""
SELECTED_STYLE = "reverse"


Cells = tuple[Text, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """A list to draw."""

    columns: tuple[str, ...]
    """Column titles; the prefix ``>`` right-aligns a column, ``*`` gives it the remaining width."""
    rows: Sequence[Callable[[], Cells]]
    """Row factories; only visible rows are built."""
    nothing: str
    """Text for an empty list."""


class Lists(Protocol):
    """Function from the board to a list."""

    def __call__(self, it: Board, look: Look, width: int) -> Listed: ...


def listed(make: Lists, it: Board, look: Look, width: int, height: int, *, active: bool) -> tuple[RenderableType, str]:
    """Return the content of a panel of ``width`` x ``height`` cells, and which rows of the list it shows."""
    result = make(it, look, width)
    if not result.rows:
        words = f"no row contains {look.needle!r}: Esc shows all" if look.needle else result.nothing
        return Text(words, style="dim"), ""
    fits = max(height - 1, 1)
    chosen = min(look.row, len(result.rows) - 1) if active else 0
    first = min(max(chosen - fits + 1, 0), max(len(result.rows) - fits, 0))
    visible = result.rows[first : first + fits]
    table = _table(result.columns)
    for index, row in enumerate(visible, first):
        cells = row()
        if active and look.row and index == chosen:
            table.add_row(*[cell.plain for cell in cells], style=SELECTED_STYLE)
        else:
            table.add_row(*cells)
    where = f"{first + 1}-{first + len(visible)} of {len(result.rows)}" if len(visible) < len(result.rows) else ""
    return table, where


def engines(it: Board, look: Look, width: int) -> Listed:
    """List the engines with version, load, cache, speed and last command; problems are red."""
    wide = width >= WIDE
    rows = sorted(shown(it.instances, look), key=_SORTS[look.sort])
    if look.reverse:
        rows.reverse()
    mark = "▼" if look.reverse else "▲"
    titles = ["engine", ">version", ">running", ">waiting", ">KV", ">tokens/s", "*", "last command"]
    titles[-1] = titles[-1] if width >= ROOMY else f"*{titles[-1]}"
    titles += [">leases", ">seen"] if wide else []
    named = {"name": 0, "version": 1, "running": 2, "waiting": 3, "kv": 4, "tokens/s": 5, "seen": 9}
    if named[look.sort] < len(titles):
        titles[named[look.sort]] += mark
    cells = max(width - (82 if wide else 66), 4)
    kept = [index for index in range(len(titles)) if width >= ROOMY or index not in (3, 6)]
    return Listed(
        columns=tuple(titles[index] for index in kept),
        rows=[partial(_engine, row, cells, wide, kept) for row in rows],
        nothing="no engine is attached",
    )


def _engine(row: InstanceRow, cells: int, wide: bool, kept: Sequence[int]) -> Cells:
    """``kept``: columns that fit; a narrow panel drops "waiting" and the curve rather than digits."""
    silent = row.seen_s > SILENCE_TIMEOUT_S
    name = Text(row.name, style="bold red" if silent else "bold")
    version = Text("-" if row.version < 0 else str(row.version), style="yellow" if row.behind else "")
    if row.loading is not None:
        version.append(f"→{row.loading}", "cyan")
    elif row.behind:
        version.append(f" -{row.behind}", "yellow")
    load = Text(str(row.running)).append(f"/{row.slots}" if row.slots else "", "dim")
    kv = Text("-", style="dim") if row.kv_used is None else Text(percent(row.kv_used))
    cut = (
        name,
        version,
        load,
        Text(str(row.waiting), style="yellow" if row.waiting else "dim"),
        kv,
        Text(short(row.tokens_per_s)),
        Text(curve(row.spark, min(cells, 60)), style="cyan"),
        Text("silent" if silent and not wide else row.command, style="red" if silent and not wide else "dim"),
    )
    observed = Text(f"{row.seen_s:.0f} s", style="bold red" if silent else "dim")
    every = (*cut, Text(str(row.held)), observed) if wide else cut
    return tuple(every[index] for index in kept)


_SORTS: dict[str, Callable[[InstanceRow], tuple[float, str]]] = {
    "name": lambda row: (0, _natural(row.name)),
    "version": lambda row: (row.version, _natural(row.name)),
    "running": lambda row: (row.running, _natural(row.name)),
    "waiting": lambda row: (row.waiting, _natural(row.name)),
    "kv": lambda row: (row.kv_used or 0.0, _natural(row.name)),
    "tokens/s": lambda row: (row.tokens_per_s, _natural(row.name)),
    "seen": lambda row: (row.seen_s, _natural(row.name)),
}


def _natural(name: str) -> str:
    """Return a sort key that puts rollout-2 before rollout-10."""
    stem, _, number = name.rpartition("-")
    return f"{stem}-{int(number):09}" if is_number(number) else name


def groups(it: Board, look: Look, width: int) -> Listed:
    """List the groups that pin the next step."""
    rows = [partial(_group, pin) for pin in shown(it.pins, look)]
    titles = ("group", ">version", ">so far", ">left", "*where")
    nothing = "no group pins a step; g NUMBER shows the story of any group"
    return Listed(columns=titles, rows=rows, nothing=nothing)


def _group(pin: PinRow) -> Cells:
    return (
        Text(str(pin.group), style="bold"),
        Text(str(pin.version)),
        Text("" if pin.so_far_s is None else span(pin.so_far_s)),
        Text("" if pin.left_s is None else f"about {span(pin.left_s)}", style="yellow"),
        Text(pin.where),
    )


def stages(it: Board, look: Look, width: int) -> Listed:
    """List the stages with their workers, waiting groups and groups in progress."""
    most = max([row.waiting + row.taken for row in it.stages], default=1)
    cells = max(min(width - 55, 24), 4)
    rows = [partial(_stage, row, most, cells) for row in shown(it.stages, look)]
    titles = ("stage", ">workers", ">in work", ">calls", ">waiting", "*", "after")
    return Listed(columns=titles, rows=rows, nothing="the trace contains no stages")


def _stage(row: StageRow, most: int, cells: int) -> Cells:
    return (
        Text(row.name, style="bold"),
        Text(str(row.workers), style="" if row.workers and not row.failing else "bold red"),
        Text(str(row.taken)),
        Text(f"{row.under_way} of {row.calls}" if row.calls else "", style="yellow" if row.full else ""),
        Text(str(row.waiting), style="yellow" if row.waiting else "dim"),
        Text(bar(row.waiting + row.taken, most, cells), style="cyan"),
        Text(" and ".join(row.after), style="dim"),
    )


def versions(it: Board, look: Look, width: int) -> Listed:
    """List the versions that the parameter server stores, who pins them, and how many engines use them."""
    most, wide = max([row.engines for row in it.versions], default=1), width >= ROOMY
    rows = [partial(_version, row, most, wide) for row in shown(it.versions, look)]
    titles = ("version", ">size", ">engines", "*pinned by", *(("", ">lineage") if wide else ()))
    return Listed(columns=titles, rows=rows, nothing="no version is published")


def _version(row: VersionRow, most: int, wide: bool) -> Cells:
    names = row.pinned_by
    pinned = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    cut = (
        Text(str(row.version), style="bold"),
        Text("" if row.nbytes is None else amount(row.nbytes)),
        Text(str(row.engines), style="" if row.engines else "dim"),
        Text(", ".join(filter(None, (row.note, pinned))), style="bold red" if row.note == "damaged" else "dim"),
    )
    more = Text(bar(row.engines, most, 10), style="green"), Text(str(row.lineage), style="dim")
    return (*cut, *more) if wide else cut


def events(it: Board, look: Look, width: int) -> Listed:
    """List the events, newest first."""
    rows = [partial(_event, row) for row in shown(it.events, look)]
    return Listed(columns=(">ago", "*event"), rows=rows, nothing="no events yet")


def _event(row: EventRow) -> Cells:
    return Text("" if row.ago_s is None else _ago(row.ago_s), style="dim"), Text(row.words, style=TONES[row.tone])


def _ago(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def processes(it: Board, look: Look, width: int) -> Listed:
    """List every process of the run."""
    rows = [partial(_process, row) for row in shown(it.roles, look)]
    return Listed(columns=("process", "*does", ""), rows=rows, nothing="no process has started")


def _process(row: RoleRow) -> Cells:
    return (
        Text(row.name, style="bold"),
        Text(row.doing, style="" if row.good else "bold red"),
        Text(f"restarted {row.restarts}x" if row.restarts else "", style="yellow"),
    )


LISTS: dict[str, Lists] = {
    "engines": engines,
    "groups": groups,
    "stages": stages,
    "versions": versions,
    "events": events,
    "processes": processes,
}
"""Lists by the name of their tab."""


def story(chapters: Sequence[Chapter], look: Look, height: int) -> RenderableType:
    """Return the story of a group, scrolled to the first visible line."""
    table = _table((">after", "event", "*what happened"))
    first = min(look.row, max(len(chapters) - height + 1, 0))
    for chapter in chapters[first : first + height - 1]:
        table.add_row(
            Text(f"+{span(chapter.after_s)}", style="dim"),
            Text(chapter.event, style="bold"),
            Text(chapter.words, style=TONES[chapter.tone]),
        )
    return table


def help_page(look: Look) -> RenderableType:
    """Return the help page with keys and colours."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold cyan", no_wrap=True)
    table.add_column()
    for keys, what in (*HELP, *(ENDS_RUN if look.ends_run else LEAVES)):
        table.add_row(keys, what)
    colours = Text.assemble(
        "A group is ",
        ("▒ leased", "blue"),
        " while an engine writes it, ",
        ("▓ staged", "cyan"),
        " while it is judged, ",
        ("█ ready", "green"),
        " to train, ",
        ("█ sealed", "magenta"),
        " in a batch. In the window a row is the groups that may train by that step at the latest; 7/16 says that 7 of "
        "the 16 that the bound admits by then are live. ",
        ("! pins", "bold red"),
        " are the groups that the next step waits for, though it has enough others: a later step would be too late. "
        "Steps have the numbers of the trace, from 0 on: step 23 makes version 24 of version 23, and is the 24th.",
    )
    return Group(table, Text(), colours)


def _table(columns: Sequence[str]) -> Table:
    table = Table(box=None, expand=True, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for column in columns:
        table.add_column(
            column.lstrip(">*"),
            justify="right" if column.startswith(">") else "left",
            ratio=1 if column.startswith("*") else None,
            no_wrap=True,
            overflow="ellipsis",
        )
    return table


def many(it: Board) -> dict[str, str]:
    """Return the counts that the title of each tab shows beside its name."""
    return {
        "engines": plural(len(it.instances), "engine"),
        "groups": f"{len(it.pins)} pin step {it.pins[0].step}" if it.pins else "",
        "stages": "",
        "versions": "",
        "events": "",
        "processes": "",
    }
