"""Each panel's inside, as a function of the board, the look and the cells that it has."""

from collections.abc import Sequence

from rich.align import Align
from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from staleflow.monitor.look import Look
from staleflow.monitor.model import Board
from staleflow.monitor.rows import AgeRow, WindowRow
from staleflow.monitor.words import bar, clock, curve, meter, number, percent, short, whole

COLOURS = {"leased": "blue", "pushed": "cyan", "occupied": "green", "sealed": "magenta", "pinning": "bold red"}
GLYPHS = {"occupied": "█", "pushed": "▓", "leased": "▒", "room": "·"}
TIME = {
    "trains": ("█", "green"),
    "older groups": ("▓", "red"),
    "engines": ("▒", "yellow"),
    "stages": ("▒", "cyan"),
    "workers": ("░", "magenta"),
    "its batch": ("▒", "yellow"),
}
"""What the trainer's time goes to."""
TONES = {"good": "green", "warn": "yellow", "bad": "bold red", "": ""}


def header(it: Board, look: Look, width: int) -> RenderableType:
    """One line: what it is, how it is, how far it is."""
    dot = "red" if it.phase.startswith("no answer") else "yellow" if look.paused else "green"
    phase = "held still" if look.paused else it.phase
    left = Text.assemble(
        ("staleflow ", "bold cyan"), (f"{it.name}  ", "bold"), ("● ", dot), f"{phase} {clock(it.elapsed_s)}"
    )
    if not it.steps:
        right: RenderableType = Text(f"step {it.step:,}" if it.ages else "")
    else:
        progress = Table.grid(padding=(0, 1))
        until = "" if it.left_s is None else f"{clock(it.left_s)} left"
        words = f"step {it.step:,} of {it.steps:,}"
        cells = min(max(width - left.cell_len - len(words) - len(until) - 5, 6), 40)
        progress.add_row(
            words, ProgressBar(it.steps, it.step, width=cells, complete_style="green", finished_style="green"), until
        )
        right = Align.right(progress)
    grid = Table.grid(expand=True)
    grid.add_column(no_wrap=True)
    grid.add_column(justify="right", no_wrap=True)
    grid.add_row(left, right)
    return grid


def why(it: Board) -> Text:
    """The sentence, and before it what nobody may overlook."""
    text = Text(overflow="fold")
    if it.violations:
        text.append(f"{it.violations} VIOLATIONS OF THE BOUND  ", "bold white on red")
    text.append("why  ", "dim")
    return text.append(it.why or "nothing has been heard yet", "yellow" if it.waits else "")


def staleness(it: Board, width: int, height: int) -> RenderableType:
    """For each age three bars: in flight, in queue, trained."""
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
    mean = f"mean {number(it.staleness_mean)}  max {whole(it.staleness_max)}  "
    summary = Text(mean, no_wrap=True).append(f"{it.violations} violations", "bold red" if it.violations else "green")
    if it.bound_of == "token":
        summary = Text(f"{percent(it.masked)} masked  ", no_wrap=True) + summary
    return Group(table, summary)


def _merged(ages: Sequence[AgeRow], height: int) -> list[tuple[str, AgeRow]]:
    """At most ``height`` rows: neighbours share one where there are more."""
    size = max(-(-len(ages) // max(height, 1)), 1)
    rows: list[tuple[str, AgeRow]] = []
    for first in range(0, len(ages), size):
        some = ages[first : first + size]
        label = str(some[0].age) if len(some) == 1 else f"{some[0].age}-{some[-1].age}"
        sums = [sum(getattr(row, key) for row in some) for key in ("in_flight", "in_queue", "consumed")]
        rows.append((label, AgeRow(age=some[0].age, in_flight=sums[0], in_queue=sums[1], consumed=sums[2])))
    return rows


def window(it: Board, width: int, height: int) -> RenderableType:
    """For each step that can still be filled, what is there for it; one sees the protocol move."""
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
    """What it does, learns, waits for; and what of each limit is used."""
    learning = _line("").append(f"{it.trainer}   ", "bold")
    cells = 12 if width < 90 else 16
    learning.append("loss ", "dim").append(f"{number(it.loss, 3)} ").append(curve(it.losses, cells), "cyan")
    reward = _line("reward ").append(f"{number(it.reward)} ").append(curve(it.rewards, cells), "green")
    if it.held_out:
        reward.append(f"  held-out {number(it.held_out[0])} → ").append(number(it.held_out[1]), "bold green")
    if height <= 4:
        return Group(learning.append("   ") + reward, _time(it, width), _rates(it, width))
    parts = [f"{key.rpartition('/')[2].replace('_for_batch', '')} {value:.2f}" for key, value in it.step_times[1:]]
    last = _line(f"last  {it.step_times[0][1]:.2f} s: {', '.join(parts)}" if parts else "")
    return Group(learning, reward, _time(it, width), last, _rates(it, width, limits=False), *_limits(it, width))


def _time(it: Board, width: int) -> Text:
    """The last minute as one bar: training, and what it waited for."""
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
        text.append("nothing is known yet", "dim")
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
    """A bar for each thing that has a limit."""
    cells = max(min(width - 44, 30), 6)
    lines: list[Text] = []
    for limit in it.limits:
        filled = min(round(limit.share * cells), cells)
        text = _line(f"{limit.name:<8} ")
        text.append("━" * filled, "green").append("━" * (cells - filled), "bright_black")
        text.append(f" {percent(limit.share):>5} ", "bold")
        if limit.unit:
            text.append(f"{short(limit.used)} of {short(limit.full)} {limit.unit}", "dim")
        lines.append(text)
    return lines


def _line(label: str) -> Text:
    """One row that begins with a label and is cut where the panel ends."""
    return Text(no_wrap=True, overflow="ellipsis").append(label, "dim")
