"""Draw the content of each panel from the board, the look and the size in cells."""

import io
from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from staleflow.monitor.look import Look
from staleflow.monitor.model import Board
from staleflow.monitor.rows import AgeRow, WindowRow
from staleflow.monitor.words import bar, clock, curve, meter, number, percent, plural, short, whole

MEASURE = Console(file=io.StringIO())
"""Console that measures and wraps text without output."""

COLOURS = {"leased": "blue", "pushed": "cyan", "occupied": "green", "sealed": "magenta", "pinning": "bold red"}
GLYPHS = {"occupied": "█", "pushed": "▓", "leased": "▒", "room": "·"}
TIME = {
    "trains": ("█", "green"),
    "older groups": ("▓", "red"),
    "engines": ("▒", "yellow"),
    "stages": ("▒", "cyan"),
    "prompts": ("░", "yellow"),
    "workers": ("░", "magenta"),
    "servers": ("░", "red"),
    "its batch": ("▒", "yellow"),
    "publish": ("░", "blue"),
    "checkpoint": ("░", "cyan"),
    "eval": ("░", "green"),
}
"""Glyph and colour of each activity of the trainer."""
TONES = {"good": "green", "warn": "yellow", "bad": "bold red", "": ""}


BRAND = "staleflow "
SHORTEST_NAME, SHORTEST_BAR, LONGEST_BAR = 12, 6, 40
WHY_ROWS, WHY_SHARE = 2, 4
"""Minimum rows of the "why" sentence, and the divisor of the screen height that gives its maximum."""


def header(it: Board, look: Look, width: int) -> RenderableType:
    """Return one line with the name, the state and the progress of the run.

    State and progress are always shown. If space is short, drop the bar first, then the middle of the name, the brand
    and the time left.
    """
    dot = "red" if it.phase.startswith("no answer") else "yellow" if look.paused else "green"
    phase = "paused" if look.paused else it.phase
    state = Text.assemble(("● ", dot), f"{phase} {clock(it.elapsed_s)}")
    far = Text(f"{it.step:,} of {plural(it.steps, 'step')}" if it.steps else plural(it.step, "step") if it.ages else "")
    until = f"  {clock(it.left_s)} left" if it.steps and it.left_s is not None else ""
    room = width - state.cell_len - far.cell_len - 4
    name = min(len(it.name), SHORTEST_NAME)
    if room >= name + len(until):
        far.append(until, "dim")
        room -= len(until)
    brand = BRAND if room >= name + len(BRAND) else ""
    name = max(min(len(it.name), room - len(brand)), 0)
    left = Text.assemble((brand, "bold cyan"), (_shortened(it.name, name), "bold"), "  " if name else "", state)
    cells = min(room - len(brand) - name - 1, LONGEST_BAR)
    if it.steps and cells >= SHORTEST_BAR:
        far = Text.assemble(progress(it.step, it.steps, cells), " ", far)
    grid = Table.grid(expand=True)
    grid.add_column(no_wrap=True)
    grid.add_column(justify="right", no_wrap=True)
    grid.add_row(left, far)
    return grid


def _shortened(name: str, cells: int) -> str:
    """Shorten a name in the middle, because it starts with the run's name and ends with its start time."""
    if len(name) <= cells:
        return name
    last = cells // 2
    return f"{name[: max(cells - last - 1, 0)]}…{name[len(name) - last :]}" if cells > 0 else ""


def progress(done: float, full: float, cells: int) -> Text:
    """Return a progress bar that is readable without colours."""
    filled = min(round(done / full * cells), cells) if full else 0
    return Text.assemble(("━" * filled, "green"), ("·" * (cells - filled), "dim"))


def why_rows(it: Board, width: int, height: int) -> int:
    """Return the number of rows for the "why" sentence on a screen of ``height`` rows."""
    needed = len(_why(it).wrap(MEASURE, width))
    return max(min(needed, height // WHY_SHARE), WHY_ROWS)


def why(it: Board, width: int, rows: int) -> Text:
    """Return the "why" sentence, preceded by any violations; text that does not fit ends in an ellipsis."""
    lines = _why(it).wrap(MEASURE, width)
    if len(lines) > rows:
        cut = lines[rows - 1]
        cut.truncate(max(width - 2, 1))
        cut.append(" …")
    return Text("\n").join(lines[:rows])


def _why(it: Board) -> Text:
    text = Text(overflow="fold")
    if it.violations:
        text.append(f"{plural(it.violations, 'VIOLATION')} OF THE BOUND".upper(), "bold white on red").append("  ")
    text.append("why  ", "dim")
    text.append(it.why or _nothing_yet(it), "yellow" if it.waits else "")
    if it.advice:
        text.append("\nadvice  ", "dim").append(it.advice, "cyan")
    return text


def _nothing_yet(it: Board) -> str:
    """Return the text for an empty ``why``: nothing waits, or the scheduler has not answered yet."""
    if it.heard:
        return "nothing waits"
    builder = [role for role in it.roles if role.name == "model"]
    if builder:
        return f"{it.phase}: {builder[0].doing}; no other process has started yet"
    return f"{it.phase}: no answer from the scheduler yet"


def staleness(it: Board, width: int, height: int) -> RenderableType:
    """Return a table with three bars for each age: in flight, in queue, trained."""
    rows = _merged(it.ages, height - 2)
    cells = max((width - 12) // 3 - 5, 2)
    titles = ("in flight", "in queue", "trained") if cells > 3 else ("flight", "queue", "trained")
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("behind", justify="right", no_wrap=True)
    for title in titles:
        table.add_column(title, no_wrap=True, width=cells + 5)
    parts = [[getattr(row, key) for _, row in rows] for key in ("in_flight", "in_queue", "consumed")]
    for index, (label, _) in enumerate(rows):
        shown = [
            Text.assemble((f"{bar(column[index], max(column), cells):<{cells}}", colour), f"{short(column[index]):>5}")
            for column, colour in zip(parts, ("blue", "cyan", "green"), strict=True)
        ]
        table.add_row(label, *shown)
    trained = _trained(it.ages)
    words = "trained: " if width > 44 else ""
    violations = plural(it.violations, "violation")
    summary = Text(f"{words}{trained}  ", no_wrap=True).append(violations, "bold red" if it.violations else "green")
    if it.bound_of == "token":
        summary = Text(f"{percent(it.masked)} masked  ", no_wrap=True) + summary
    return Group(table, summary)


def _trained(ages: Sequence[AgeRow]) -> str:
    """Return the mean and maximum age of all trained groups."""
    count = sum(row.consumed for row in ages)
    mean = sum(row.age * row.consumed for row in ages) / count if count else None
    return f"mean {number(mean)}  max {whole(max((row.age for row in ages if row.consumed), default=None))}"


def _merged(ages: Sequence[AgeRow], height: int) -> list[tuple[str, AgeRow]]:
    """Merge neighbouring ages so that at most ``height`` rows remain."""
    size = max(-(-len(ages) // max(height, 1)), 1)
    rows: list[tuple[str, AgeRow]] = []
    for first in range(0, len(ages), size):
        some = ages[first : first + size]
        label = str(some[0].age) if len(some) == 1 else f"{some[0].age}-{some[-1].age}"
        sums = [sum(getattr(row, key) for row in some) for key in ("in_flight", "in_queue", "consumed")]
        rows.append((label, AgeRow(age=some[0].age, in_flight=sums[0], in_queue=sums[1], consumed=sums[2])))
    return rows


def window(it: Board, width: int, height: int) -> RenderableType:
    """Return one bar for each open step of the window, with its ready, staged and leased groups."""
    rows = it.window[: max(height - 1, 1)]
    full = max([it.batch_size, *(row.leased + row.pushed + row.occupied for row in rows)])
    cells = max(width - 22, 8)
    lines = [_window_row(row, it.bound_of == "token", full, cells) for row in rows]
    legend = Text.assemble(("█ ready ", "green"), ("▓ staged ", "cyan"), ("▒ leased ", "blue"), no_wrap=True)
    if any(row.pinning for row in rows):
        legend.append("! pins", COLOURS["pinning"])
    return Group(*lines, *[Text()] * (height - 1 - len(lines)), legend)


def _window_row(row: WindowRow, token: bool, full: int, cells: int) -> Text:
    label = "any step" if token and not row.sealed else f"{'step' if row.sealed else 'by'} {row.deadline}"
    text = Text(f"{label:>9} ", no_wrap=True)
    if row.sealed:
        filled = meter((row.occupied,), full, cells)[0]
        return text.append("█" * filled, "magenta").append(f"{'':<{cells - filled}} {row.sealed}", "magenta")
    parts = meter((row.occupied, row.pushed, row.leased), full, cells)
    for state, count in zip(("occupied", "pushed", "leased"), parts, strict=True):
        text.append(GLYPHS[state] * count, COLOURS[state])
    text.append(GLYPHS["room"] * (cells - sum(parts)), "dim")
    text.append(f" {row.total}/{row.room}")
    return text.append(f" !{row.pinning}", COLOURS["pinning"]) if row.pinning else text


def trainer(it: Board, width: int, height: int) -> RenderableType:
    """Return the trainer's activity, its curves and waits, and the use of each limit."""
    cells = 12 if width < 90 else 16
    if height <= 4:
        numbers = len(_both(it, 1))  # with a curve of one value: nothing is drawn
        both = _both(it, min(cells, max((width - numbers) // 2, 3)))
        return Group(both, _time(it, width), _rates(it, width))
    learning, reward = _learning(it, cells)
    parts = [f"{key.rpartition('/')[2].replace('_for_batch', '')} {value:.2f}" for key, value in it.step_times[1:]]
    last = _line(f"last  {it.step_times[0][1]:.2f} s: {', '.join(parts)}" if parts else "")
    return Group(learning, reward, _time(it, width), last, _rates(it, width, limits=False), *_limits(it, width))


def _both(it: Board, cells: int) -> Text:
    """Return loss and reward in one line."""
    learning, reward = _learning(it, cells)
    return learning.append("   ") + reward


def _learning(it: Board, cells: int) -> tuple[Text, Text]:
    """Return a line with step and loss and a line with rewards, each with a curve of the last ``cells`` steps."""
    learning = _line("").append(f"{it.trainer}   ", "bold")
    learning.append("loss ", "dim").append(f"{number(it.loss, 3)} ").append(curve(it.losses, cells), "cyan")
    reward = _line("reward ").append(f"{number(it.reward)} ").append(curve(it.rewards, cells), "green")
    if it.held_out:
        reward.append(f"  held-out {number(it.held_out[0])} → ").append(number(it.held_out[1]), "bold green")
    return learning, reward


def _time(it: Board, width: int) -> Text:
    """Return the trainer's last minute as one bar: training, and each cause of waiting."""
    text = _line("time  ")
    cells = max(width // (3 if width > 90 else 5), 8)
    names = [name for name, _ in it.trainer_time]
    parts = meter([round(1000 * share) for _, share in it.trainer_time], 1000, cells)
    for name, count in zip(names, parts, strict=True):
        glyph, colour = TIME.get(name, ("?", ""))
        text.append(glyph * count, colour)
    text.append(" ")
    shares = dict(it.trainer_time)
    if "trains" in shares:
        text.append(f" trains {percent(shares.pop('trains'))}", TIME["trains"][1])
    for index, (name, share) in enumerate(shares.items()):
        text.append(", " if index else "  waits: ", "dim").append(
            f"{name} {percent(share)}", TIME.get(name, ("", ""))[1]
        )
    if not names:
        text.append("no data yet", "dim")
    return text


def _rates(it: Board, width: int, *, limits: bool = True) -> Text:
    text = _line("tokens/s  ")
    text.append(f"{whole(it.trained_per_s)}", "green").append(" trained, ", "dim")
    text.append(f"{whole(it.generated_per_s)} ", "cyan").append("generated ", "dim")
    text.append(curve(it.generated, max(width - 68, 8)), "cyan")
    if limits:
        for limit in it.limits:
            if limit.name in ("engines", "window"):
                text.append(f"  {limit.name} ", "dim").append(percent(limit.share))
    return text


def _limits(it: Board, width: int) -> list[Text]:
    """Return one bar for each limit."""
    cells = max(min(width - 44, 30), 6)
    lines: list[Text] = []
    for limit in it.limits:
        text = _line(f"{limit.name:<8} ").append(progress(limit.used, limit.full, cells))
        text.append(f" {percent(limit.share):>5} ", "bold")
        if limit.unit:
            text.append(f"{short(limit.used)} of {short(limit.full)} {limit.unit}", "dim")
        lines.append(text)
    return lines


def _line(label: str) -> Text:
    """Return a row that starts with a label and is cut at the edge of the panel."""
    return Text(no_wrap=True, overflow="ellipsis").append(label, "dim")
