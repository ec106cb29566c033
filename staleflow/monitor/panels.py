"""Each panel's inside, as a function of the board, the look and the cells that it has."""

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
"""To wrap text; shows nothing."""

COLOURS = {"leased": "blue", "pushed": "cyan", "occupied": "green", "sealed": "magenta", "pinning": "bold red"}
GLYPHS = {"occupied": "█", "pushed": "▓", "leased": "▒", "room": "·"}
TIME = {
    "trains": ("█", "green"),
    "older groups": ("▓", "red"),
    "engines": ("▒", "yellow"),
    "stages": ("▒", "cyan"),
    "workers": ("░", "magenta"),
    "servers": ("░", "red"),
    "its batch": ("▒", "yellow"),
}
"""What the trainer's time goes to."""
TONES = {"good": "green", "warn": "yellow", "bad": "bold red", "": ""}


BRAND = "staleflow "
SHORTEST_NAME, SHORTEST_BAR, LONGEST_BAR = 12, 6, 40
WHY_ROWS, WHY_SHARE = 2, 4
"""Rows of the sentence: so many always, and up to one in four of the screen while it needs them."""


def header(it: Board, look: Look, width: int) -> RenderableType:
    """One line: what it is, how it is, how far it is. The last two always stay; where there is no room for all, the bar
    goes first, then the middle of the name, our own name, and the time left."""
    dot = "red" if it.phase.startswith("no answer") else "yellow" if look.paused else "green"
    phase = "held still" if look.paused else it.phase
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
    """Without its middle: what a run is called comes first, when it began comes last."""
    if len(name) <= cells:
        return name
    last = cells // 2
    return f"{name[: max(cells - last - 1, 0)]}…{name[len(name) - last :]}" if cells > 0 else ""


def progress(done: float, full: float, cells: int) -> Text:
    """A bar that can be read without colours."""
    filled = min(round(done / full * cells), cells) if full else 0
    return Text.assemble(("━" * filled, "green"), ("·" * (cells - filled), "dim"))


def why_rows(it: Board, width: int, height: int) -> int:
    """Of the sentence, on a screen of ``height`` rows."""
    needed = len(_why(it).wrap(MEASURE, width))
    return max(min(needed, height // WHY_SHARE), WHY_ROWS)


def why(it: Board, width: int, rows: int) -> Text:
    """The sentence, and before it what nobody may overlook; what does not fit ends in an ellipsis."""
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
    return text.append(it.why or _nothing_yet(it), "yellow" if it.waits else "")


def _nothing_yet(it: Board) -> str:
    """Before the scheduler has said anything."""
    if it.heard:
        return "nothing waits"
    builder = [role for role in it.roles if role.name == "model"]
    if builder:
        return f"{it.phase}: {builder[0].doing}; nothing else has been started yet"
    return f"{it.phase}: the scheduler has not said anything yet"


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
    trained = _trained(it.ages)
    words = "trained: " if width > 44 else ""
    violations = plural(it.violations, "violation")
    summary = Text(f"{words}{trained}  ", no_wrap=True).append(violations, "bold red" if it.violations else "green")
    if it.bound_of == "token":
        summary = Text(f"{percent(it.masked)} masked  ", no_wrap=True) + summary
    return Group(table, summary)


def _trained(ages: Sequence[AgeRow]) -> str:
    """Of the last column: everything that was trained so far."""
    count = sum(row.consumed for row in ages)
    mean = sum(row.age * row.consumed for row in ages) / count if count else None
    return f"mean {number(mean)}  max {whole(max((row.age for row in ages if row.consumed), default=None))}"


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
    cells = 12 if width < 90 else 16
    if height <= 4:
        numbers = len(_both(it, 1))  # one value is no curve
        both = _both(it, min(cells, max((width - numbers) // 2, 3)))
        return Group(both, _time(it, width), _rates(it, width))
    learning, reward = _learning(it, cells)
    parts = [f"{key.rpartition('/')[2].replace('_for_batch', '')} {value:.2f}" for key, value in it.step_times[1:]]
    last = _line(f"last  {it.step_times[0][1]:.2f} s: {', '.join(parts)}" if parts else "")
    return Group(learning, reward, _time(it, width), last, _rates(it, width, limits=False), *_limits(it, width))


def _both(it: Board, cells: int) -> Text:
    """Loss and reward in one line."""
    learning, reward = _learning(it, cells)
    return learning.append("   ") + reward


def _learning(it: Board, cells: int) -> tuple[Text, Text]:
    """Step and loss, and the rewards; the last ``cells`` steps of each as a curve."""
    learning = _line("").append(f"{it.trainer}   ", "bold")
    learning.append("loss ", "dim").append(f"{number(it.loss, 3)} ").append(curve(it.losses, cells), "cyan")
    reward = _line("reward ").append(f"{number(it.reward)} ").append(curve(it.rewards, cells), "green")
    if it.held_out:
        reward.append(f"  held-out {number(it.held_out[0])} → ").append(number(it.held_out[1]), "bold green")
    return learning, reward


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
        text = _line(f"{limit.name:<8} ").append(progress(limit.used, limit.full, cells))
        text.append(f" {percent(limit.share):>5} ", "bold")
        if limit.unit:
            text.append(f"{short(limit.used)} of {short(limit.full)} {limit.unit}", "dim")
        lines.append(text)
    return lines


def _line(label: str) -> Text:
    """One row that begins with a label and is cut where the panel ends."""
    return Text(no_wrap=True, overflow="ellipsis").append(label, "dim")
