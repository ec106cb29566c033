"""Lay out the whole screen from the board, the look and the size: 80 x 24 shows one list, 200 x 60 shows all panels.

``top``, ``run`` and ``status`` share this layout.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.layout import Layout
from rich.panel import Panel
from rich.segment import Segment
from rich.text import Text

from staleflow.monitor import panels, tables
from staleflow.monitor.look import TABS, Look
from staleflow.monitor.model import Board
from staleflow.monitor.story import Chapter
from staleflow.monitor.words import INSECURE, plural

WIDE, HIGH = 150, 34
"""Minimum columns and rows for showing all panels at once."""
NARROW = 72
"""Minimum columns for two panels side by side."""

BACK_HINT = "Esc goes back"


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenStory:
    """The story on screen."""

    headline: str
    chapters: tuple[Chapter, ...]


@dataclass(frozen=True, slots=True)
class Screen:
    """A layout with a fixed number of rows, independent of the terminal's height."""

    layout: Layout
    height: int

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from console.render(self.layout, options.update_height(self.height))


@dataclass(frozen=True, slots=True)
class Scrolled:
    """Viewport of ``height`` lines that starts at line ``first``, or shows the last lines if ``first`` is too large."""

    inside: RenderableType
    first: int
    height: int

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(self.inside, options.update(height=None), pad=False)
        first = min(self.first, max(len(lines) - self.height, 0))
        for line in lines[first : first + self.height]:
            yield from line
            yield Segment.line()


def dashboard(
    it: Board, look: Look, width: int, height: int, *, footer: Text | None = None, open_story: OpenStory | None = None
) -> Screen:
    """Return the screen of ``height`` rows and ``width`` cells. ``footer`` is the last row; None without key input."""
    root = Layout()
    last = [] if footer is None else [_row("footer", footer, 1)]
    insecure = [_row("insecure", Text(INSECURE, style="bold red", no_wrap=True), 1)] if it.insecure else []
    why_height = panels.why_rows(it, width, height)
    inside = height - 1 - why_height - len(last) - len(insecure)
    top = [
        _row("header", panels.header(it, look, width), 1),
        _row("why", panels.why(it, width, why_height), why_height),
        *insecure,
    ]
    root.split_column(*top, *_middle(it, look, width, inside, open_story), *last)
    return Screen(root, height)


def _middle(it: Board, look: Look, width: int, height: int, open_story: OpenStory | None) -> list[Layout]:
    if look.help:
        page = Scrolled(tables.help_page(look), look.row, height - 2)
        return [_row("help", _panel("keys", page, BACK_HINT, active=True), height)]
    if look.story is not None:
        return [_row("story", _story(look, height, open_story), height)]
    if not it.heard:
        return [_list("processes", it, look, width, height)]
    if width >= WIDE and height >= HIGH - 4:
        return _everything(it, look, width, height)
    upper = min(max(len(it.ages), len(it.window), 3) + 4, 9, max(height - 8, 0)) if it.ages or it.window else 0
    upper = upper if upper > 2 else 0  # a box needs at least one row inside
    middle = 0 if not it.ages or height - upper < 10 else 11 if height - upper >= 30 else 5
    result: list[Layout] = []
    if upper:
        row, left = Layout(name="upper", size=upper), min(width // 2 - 2, 56)
        both = [_staleness(it, left, upper), _window(it, width - left, upper)]
        row.split_row(*(both if width >= NARROW else [_window(it, width, upper)]))
        result.append(row)
    if middle:
        result.append(_row("trainer", _panel("trainer", panels.trainer(it, width - 4, middle - 2)), middle))
    rest = height - upper - middle
    beside = rest - rest // 3 if rest >= 18 and look.tab != "events" else rest
    result.append(_tabbed(it, look, width, beside))
    if beside < rest:
        result.append(_list("events", it, look, width, rest - beside))
    return result


def _everything(it: Board, look: Look, width: int, height: int) -> list[Layout]:
    upper = min(max(len(it.ages) + 4, len(it.window) + 3, 11), height // 3)
    rows = max(len(it.instances), len(it.stages) + len(it.pins) + 4, 6) + 3
    middle = min(rows, (height - upper) * 3 // 5)
    lower = height - upper - middle
    third = width // 3
    first, second, third_row = (Layout(size=size) for size in (upper, middle, lower))
    first.split_row(
        _staleness(it, third, upper),
        _window(it, third, upper),
        _row("trainer", _panel("trainer", panels.trainer(it, width - 2 * third - 4, upper - 2)), None),
    )
    side = max(width // 3, 60)
    right = Layout(size=side)
    right.split_column(
        _list("groups", it, look, side, middle // 2), _list("stages", it, look, side, middle - middle // 2)
    )
    second.split_row(_list("engines", it, look, width - side, middle, wide=True), right)
    third_row.split_row(
        _list("versions", it, look, third, lower, wide=True),
        _list("events", it, look, third, lower, wide=True),
        _list("processes", it, look, width - 2 * third, lower, wide=True),
    )
    return [first, second, third_row]


def _staleness(it: Board, width: int, height: int) -> Layout:
    of = "" if it.bound is None else f"bound {it.bound}" + (", a token" if it.bound_of == "token" else "")
    title = f"staleness · {of}" if of else "staleness"
    return Layout(_panel(title, panels.staleness(it, width - 4, height - 2)), size=width)


def _window(it: Board, width: int, height: int) -> Layout:
    title = f"window · {plural(it.batch_size, 'group')} a step"
    if it.policy and width >= 50:
        title += f" · overdue: {it.policy}"
    return Layout(_panel(title, panels.window(it, width - 4, height - 2)), size=width)


def _list(name: str, it: Board, look: Look, width: int, height: int, *, wide: bool = False) -> Layout:
    """Return a panel with one list. ``wide``: it stands beside others, so its width is fixed instead of its height."""
    active = look.tab == name
    inside, where = tables.listed(tables.LISTS[name], it, look, width - 4, height - 2, active=active)
    panel = _panel(_titled(name, it), inside, where, active=active)
    return Layout(panel, size=width if wide else height)


def _tabbed(it: Board, look: Look, width: int, height: int) -> Layout:
    inside, where = tables.listed(tables.LISTS[look.tab], it, look, width - 4, height - 2, active=True)
    title = Text()
    for number, name in enumerate(TABS, 1):
        style = "bold reverse" if name == look.tab else "dim"
        title.append(f" {number}:{name} ", style)
    return Layout(Panel(inside, box=box.ROUNDED, title=title, title_align="left", subtitle=_where(where, look),
                        subtitle_align="right", border_style="bright_black"), size=height)  # fmt: skip


def _story(look: Look, height: int, open_story: OpenStory | None) -> Panel:
    if open_story is None:
        return _panel(f"group {look.story}", Text("reading the trace", style="dim"), BACK_HINT, active=True)
    body: RenderableType = tables.story(open_story.chapters, look, height - 4) if open_story.chapters else Text()
    headline = Text(open_story.headline, style="bold", no_wrap=True, overflow="ellipsis")
    return _panel(f"group {look.story}", Group(headline, Text(), body), BACK_HINT, active=True)


def _titled(name: str, it: Board) -> str:
    more = tables.many(it)[name]
    return f"{name} · {more}" if more and name != "engines" else more or name


def _where(where: str, look: Look) -> str:
    return " ".join(filter(None, (where, f"only {look.needle!r}" if look.needle else "")))


def _panel(title: str, inside: RenderableType, where: str = "", *, active: bool = False) -> Panel:
    return Panel(
        inside,
        box=box.ROUNDED,
        title=Text(f" {title} ", style="bold"),
        title_align="left",
        subtitle=where or None,
        subtitle_align="right",
        border_style="cyan" if active else "bright_black",
    )


def _row(name: str, inside: RenderableType, size: int | None) -> Layout:
    return Layout(inside, name=name, size=size)


def keys(look: Look, *, hint: str = "", width: int = 0) -> Text:
    """Return the last row: the available keys, or the text being typed.

    With a ``width`` in cells, keys are dropped from the end, except for two, until ``hint`` fits; ``?`` lists all keys.
    """
    if look.typing:
        return Text.assemble((f" {look.typing}: ", "bold cyan"), look.typed, ("▏", "blink"), ("   Enter, Esc", "dim"))
    leaves = "Ctrl-C end" if look.ends_run else "q leave"
    shown: Sequence[str] = (leaves, "? keys", "1-6 lists", "s sort", "/ filter", "g story", "space pause")
    text = Text(no_wrap=True, overflow="ellipsis")
    if look.story is not None or look.help:
        shown = ("Esc back", "↑,↓ scroll")
    elif look.speed is not None:
        shown = (leaves, "? keys", "space pause", "+,- speed", "←,→ seek", "/ filter", "g story")
        text.append(f" {look.speed:g}x ", "bold cyan")
    while (
        hint and len(shown) > 2 and width and len(text) + sum(len(item) + 2 for item in shown) + 1 + len(hint) > width
    ):
        shown = shown[:-1]
    for item in shown:
        key, _, what = item.partition(" ")
        text.append(f" {key} ", "reverse").append(f"{what} ", "dim")
    return text.append(f" {hint}", "dim") if hint else text
