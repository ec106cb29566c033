"""Command-line overrides such as ``staleness.max_staleness=2``: TOML values under dotted keys."""

import datetime
import tomllib
from collections.abc import Iterable
from typing import Any, cast

from staleflow.configs.errors import ConfigError, shown

Table = dict[str, Any]


def parse(override: str) -> tuple[tuple[str, ...], Any]:
    """Parse ``a.b=value`` to (("a", "b"), value)."""
    key, equals, text = override.partition("=")
    path = tuple(part.strip() for part in key.split("."))
    if not equals or not all(path):
        raise ConfigError("override", override, "it must be key=value, for example staleness.max_staleness=2")
    return path, value_of(text.strip())


def value_of(text: str) -> Any:
    """Parse a TOML value; text that is none (a bare word, a path, a date) is returned as a string."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    value = parsed.pop("value")
    is_time = isinstance(value, datetime.date | datetime.time)
    return text if parsed or is_time else value


def apply(table: Table, overrides: Iterable[tuple[tuple[str, ...], Any]]) -> Table:
    """Return a copy of ``table`` with all overrides applied in order."""
    for path, value in overrides:
        table = _put(table, path, value, ())
    return table


def _put(table: Table, path: tuple[str, ...], value: Any, above: tuple[str, ...]) -> Table:
    key, *rest = path
    if not rest:
        return {**table, key: value}
    inner = table.get(key, {})
    if not isinstance(inner, dict):
        name = ".".join((*above, key))
        raise ConfigError(".".join((*above, *path)), value, f"{name} is {shown(inner)}, not a table")
    return {**table, key: _put(cast(Table, inner), tuple(rest), value, (*above, key))}
