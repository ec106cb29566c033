"""The operator's mistakes: one line each, exit code 2, nothing started."""

from enum import Enum
from typing import cast


class Absent(Enum):
    """Stands for a value that is not there, or too long to be read in a line."""

    MISSING = "missing"
    TABLE = "a table"


MISSING, TABLE = Absent.MISSING, Absent.TABLE


class ConfigError(Exception):
    """``what`` is ``value``; ``allowed`` says what it must be. ``str`` is one line."""

    def __init__(self, what: str, value: object, allowed: str) -> None:
        super().__init__(" ".join(f"{what} is {shown(value)}; {allowed}".split()))
        self.what = what
        self.value = value
        self.allowed = allowed


def shown(value: object, limit: int = 120) -> str:
    """A value as a person wrote it in TOML, cut when it is long."""
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
    """A letter; what a terminal would obey instead of showing it, as its escape."""
    return letter if letter.isprintable() else letter.encode("unicode_escape").decode("ascii")
