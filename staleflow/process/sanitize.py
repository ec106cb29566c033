"""What others said, made fit for a terminal: nothing of it is obeyed, all of it can be read.

Names, reasons and traces come from peers and files. Whoever shows them passes them through here once, where they come
in: ``Snapshot``, a story, an error. rich drops a bell, not an escape sequence.
"""

from collections.abc import Mapping
from typing import Any

MOST = 1e100
"""Nothing that was measured is larger; sums and differences of such numbers are numbers still."""
DEEPEST = 20
"""Levels of plain data that are shown; no status has half as many."""
_FORMAT = (0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A))
"""Line ends, and what turns the direction of text."""
_PLAIN = {
    **{code: f"\\x{code:02x}" for code in (*range(9), *range(10, 32), *range(127, 160))},
    **{code: f"\\u{code:04x}" for code in _FORMAT},
}
_JSON = {code: f"\\u{code:04x}" for code in (*range(127, 160), *_FORMAT)}


def printable(text: str) -> str:
    """``text`` in one line, control characters written out as ``\\x1b``."""
    return text if text.isprintable() else text.translate(_PLAIN)


def printable_lines(text: str) -> str:
    """The same of several lines, which stay lines."""
    return "\n".join(map(printable, text.split("\n")))


def all_printable(value: Any, deep: int = DEEPEST) -> Any:
    """A copy of plain data, every text in it, keys too, as ``printable`` writes it; None for what no scale can show, a
    NaN, an infinity, or a number that nobody measured."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, Mapping):
        return {all_printable(key): all_printable(inner, deep - 1) for key, inner in value.items()} if deep else {}  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, list | tuple):
        inner = [all_printable(inner, deep - 1) for inner in value] if deep else []  # pyright: ignore[reportUnknownVariableType]
        return tuple(inner) if isinstance(value, tuple) else inner
    return None if isinstance(value, float) and not -MOST <= value <= MOST else value


def json_line(value: object) -> str:
    """One line of JSON that a terminal may show: beyond what JSON itself escapes, C1 controls and the like too."""
    import msgspec  # what only wants an error printed does without

    return msgspec.json.encode(value).decode().translate(_JSON)
