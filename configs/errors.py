"""Configuration errors of the operator: one line each, exit code 2, nothing started."""

from enum import Enum
from typing import cast


class Absent(Enum):
    """Placeholder for a value that is missing, or too long for one line."""

    MISSING = "missing"
    TABLE = "a table"


MISSING, TABLE = Absent.MISSING, Absent.TABLE


class ConfigError(Exception):
    """The value of ``what`` is ``value``, but must be as ``allowed`` describes. ``str`` is one line."""

    def __init__(self, what: str, value: object, allowed: str) -> None:
        super().__init__(" ".join(f"{what} is {shown(value)}; {allowed}".split()))
        self.what = what
        self.value = value
        self.allowed = allowed


def shown(value: object, limit: int = 120) -> str:
    """Return a value as it would be written in TOML, cut if it is longer than ``limit``."""
    match value:
        case Absent():
            return value.value
        case bool():
            text = "true" if value else "false"
        case str():
            text = f'"{"".join(map(_visible, value))}"'
        case list():
            text = f"[{', '.join(shown(item) for item in cast(list[object], value))}]"
        case _:
            text = str(value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def _visible(letter: str) -> str:
    """Return a character, or its escape if a terminal would interpret it instead of showing it."""
    return letter if letter.isprintable() else letter.encode("unicode_escape").decode("ascii")
