"""The operator's mistakes: one line each, exit code 2, nothing started."""

from enum import Enum


class Absent(Enum):
    """Stands for a value that is not there."""

    MISSING = "missing"


MISSING = Absent.MISSING


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
            text = f'"{value}"'
        case _:
            text = str(value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
