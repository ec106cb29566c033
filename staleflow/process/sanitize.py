"""Make text of peers safe for a terminal: all of it is legible, none of it is interpreted.

Names, reasons and traces come from peers and files. Display code passes them through here once, where they enter:
``Snapshot``, a story, an error. rich drops a bell, but not an escape sequence.
"""

from collections.abc import Mapping
from typing import Any

MAX_MAGNITUDE = 1e100
"""Larger than any measured number; sums and differences of numbers within it stay finite."""
MAX_DEPTH = 20
"""Maximum nesting of plain data that is shown; no status has half as many levels."""
_FORMAT = (0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A))
"""Line ends, and characters that change the direction of text."""
_PLAIN = {
    **{code: f"\\x{code:02x}" for code in (*range(9), *range(10, 32), *range(127, 160))},
    **{code: f"\\u{code:04x}" for code in _FORMAT},
}
_JSON = {code: f"\\u{code:04x}" for code in (*range(127, 160), *_FORMAT)}


def printable(text: str) -> str:
    """Return ``text`` in one line, with control characters written as ``\\x1b``."""
    return text if text.isprintable() else text.translate(_PLAIN)


def printable_lines(text: str) -> str:
    """Like ``printable``, but keep line ends."""
    return "\n".join(map(printable, text.split("\n")))


def all_printable(value: Any, depth: int = MAX_DEPTH) -> Any:
    """Return a copy of plain data and structs with every text in it, keys included, made ``printable``.

    Numbers that no scale can show become None, or the default of a struct's field: NaN, infinities and numbers beyond
    any measurement.
    """
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, Mapping):
        return {all_printable(key): all_printable(inner, depth - 1) for key, inner in value.items()} if depth else {}  # pyright: ignore[reportUnknownVariableType]
    if hasattr(value, "__struct_fields__"):
        fields = {name: all_printable(getattr(value, name), depth - 1) for name in value.__struct_fields__}
        return type(value)(**{name: inner for name, inner in fields.items() if inner is not None})
    if isinstance(value, list | tuple):
        inner = [all_printable(inner, depth - 1) for inner in value] if depth else []  # pyright: ignore[reportUnknownVariableType]
        return tuple(inner) if isinstance(value, tuple) else inner
    return None if isinstance(value, float) and not -MAX_MAGNITUDE <= value <= MAX_MAGNITUDE else value


def json_line(value: object) -> str:
    """Encode one line of JSON that is safe for a terminal: escape C1 and format characters too, beyond JSON's own
    escapes."""
    import msgspec  # imported late: printing an error must not need msgspec

    return msgspec.json.encode(value).decode().translate(_JSON)
