"""State of the interactive screen and its key bindings. No IO: a function from state and key to the next state."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from staleflow.monitor.model import Board

TABS = ("engines", "groups", "stages", "versions", "events", "processes")
"""Tabs with rows, on the keys 1 to 6."""
SORTS = ("name", "version", "running", "waiting", "kv", "tokens/s", "seen")
"""Sort columns of the engines."""
SPEEDS = (0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 1000.0)
JUMP_S = 10.0
PAGE = 10
ALL_ROWS = 10**9
"""More rows than any list has."""
MAX_FILTER_LENGTH = 40
"""Maximum length of a filter in characters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """User-interface state of the screen."""

    tab: str = TABS[0]
    row: int = 0
    """Selected row of the tab, or first visible line of a story or of the help."""
    sort: str = SORTS[0]
    reverse: bool = False
    needle: str = ""
    """Filter: only rows that contain it are shown."""
    typing: str = ""
    """Input that receives characters: filter, group, or empty."""
    typed: str = ""
    paused: bool = False
    help: bool = False
    story: int | None = None
    """Group whose story is open."""
    leaving: bool = False
    ends_run: bool = False
    """True in the view of ``staleflow run``: Ctrl-C ends the run, and no key leaves the screen."""
    speed: float | None = None
    """Speed of a replay; None for a live run."""
    jump_s: float = 0.0
    """Requested relative seek in a replay; the replay loop resets it to 0."""


class Row(Protocol):
    """Row of a list."""

    @property
    def text(self) -> str: ...


AnyRow = TypeVar("AnyRow", bound=Row)


def shown(rows: Sequence[AnyRow], look: Look) -> list[AnyRow]:
    """Return the rows that match the filter."""
    return [row for row in rows if look.needle in row.text]


def is_number(text: str) -> bool:
    """Return whether the text consists of digits 0 to 9 only; ``str.isdigit`` also accepts ², which ``int`` rejects."""
    return text.isascii() and text.isdecimal()


def press(look: Look, key: str, it: Board) -> Look:
    """Return the state after a key press.

    ``key`` is a character, or one of enter, escape, backspace, tab, backtab, up, down, left, right, pageup, pagedown,
    home, end, interrupt. ``it`` is the board on screen. It does not contain the length of a story or of the help, so
    ``end`` works in lists only.
    """
    if key == "interrupt":
        return _leave(look)
    if look.typing:
        return _type(look, key)
    if look.help and key not in _MOVES:
        return replace(look, help=False, row=0)
    if look.story is not None and key in ("escape", "q", "backspace", "enter"):
        return replace(look, story=None, row=0)
    if key in _MOVES:
        return _move(look, key, it)
    if is_number(key) and 0 < int(key) <= len(TABS):
        return replace(look, tab=TABS[int(key) - 1], row=0, story=None)
    if look.speed is not None and key in _REPLAY:
        return _REPLAY[key](look)
    if key == "enter" and look.tab == "groups" and (pins := shown(it.pins, look)):
        return replace(look, story=pins[min(look.row, len(pins) - 1)].group, row=0)
    return _KEYS[key](look) if key in _KEYS else look


def _move(look: Look, key: str, it: Board) -> Look:
    if look.help or look.story is not None:
        return look if key == "end" else replace(look, row=max(look.row + _MOVES[key], 0))
    last = max(len(shown(_ROWS[look.tab](it), look)) - 1, 0)
    return replace(look, row=min(max(min(look.row, last) + _MOVES[key], 0), last))


def _type(look: Look, key: str) -> Look:
    if key == "escape":
        return replace(look, typing="", typed="", needle="" if look.typing == "filter" else look.needle)
    if key == "enter":
        if look.typing == "group" and look.typed:
            return replace(look, typing="", typed="", story=int(look.typed), row=0)
        return replace(look, typing="", typed="")
    typed = look.typed[:-1] if key == "backspace" else look.typed + key if len(key) == 1 else look.typed
    if look.typing == "group":
        typed = "".join(character for character in typed if is_number(character))[:18]
        return replace(look, typed=typed)
    return replace(look, typed=typed[:MAX_FILTER_LENGTH], needle=typed[:MAX_FILTER_LENGTH], row=0)


def _leave(look: Look) -> Look:
    return look if look.ends_run else replace(look, leaving=True)


def _tab(look: Look, by: int) -> Look:
    return replace(look, tab=TABS[(TABS.index(look.tab) + by) % len(TABS)], row=0, story=None)


def _sort(look: Look) -> Look:
    following = SORTS[(SORTS.index(look.sort) + 1) % len(SORTS)]
    return replace(look, tab="engines", sort=following, reverse=following not in ("name", "version"), row=0)


def _faster(look: Look, by: int) -> Look:
    speed = look.speed or 1.0
    nearest = min(range(len(SPEEDS)), key=lambda index: abs(SPEEDS[index] - speed))
    return replace(look, speed=SPEEDS[min(max(nearest + by, 0), len(SPEEDS) - 1)])


_MOVES = {"up": -1, "down": 1, "k": -1, "j": 1, "pageup": -PAGE, "pagedown": PAGE, "home": -ALL_ROWS, "end": ALL_ROWS}
_ROWS: dict[str, Callable[[Board], Sequence[Row]]] = {
    "engines": lambda it: it.instances,
    "groups": lambda it: it.pins,
    "stages": lambda it: it.stages,
    "versions": lambda it: it.versions,
    "events": lambda it: it.events,
    "processes": lambda it: it.roles,
}
_KEYS: dict[str, Callable[[Look], Look]] = {
    "q": _leave,
    "?": lambda look: replace(look, help=True, row=0),
    "h": lambda look: replace(look, help=True, row=0),
    " ": lambda look: replace(look, paused=not look.paused),
    "p": lambda look: replace(look, paused=not look.paused),
    "s": _sort,
    "r": lambda look: replace(look, reverse=not look.reverse),
    "/": lambda look: replace(look, typing="filter", typed=look.needle),
    "g": lambda look: replace(look, typing="group", typed=""),
    "escape": lambda look: replace(look, needle="", row=0),
    "tab": lambda look: _tab(look, 1),
    "backtab": lambda look: _tab(look, -1),
}
_REPLAY: dict[str, Callable[[Look], Look]] = {
    "+": lambda look: _faster(look, 1),
    "=": lambda look: _faster(look, 1),
    "-": lambda look: _faster(look, -1),
    "right": lambda look: replace(look, jump_s=JUMP_S),
    "left": lambda look: replace(look, jump_s=-JUMP_S),
}
HELP = (
    ("1 … 6, Tab", "select a list"),
    ("↑ ↓ PgUp PgDn", "select a row, or scroll"),
    ("Enter", "show the story of a pinning group"),
    ("g NUMBER", "show the story of any group"),
    ("/ TEXT", "show only rows with TEXT; Esc shows all"),
    ("s, r", "sort the engines by the next column, reverse the order"),
    ("Space", "pause the screen; the run continues"),
    ("+ -, ← →", "replay: faster, slower, ten seconds back or forward"),
)
"""Keys with their descriptions."""
LEAVES = ("q, Ctrl-C", "leave; the run continues"), ("Ctrl-Z", "suspend to the shell; fg returns")
ENDS_RUN = (
    ("Ctrl-C", "end the run; staleflow run --resume continues it"),
    ("Ctrl-Z", "suspend to the shell; engines and trainer continue; fg returns"),
)
"""Last lines of the help: for ``top``, and for the view of ``staleflow run``."""
