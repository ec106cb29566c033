"""Typed views of decoded JSON."""

from collections.abc import Mapping
from typing import Any, cast


def fields(value: object) -> Mapping[str, Any]:
    """Return the fields of an object; empty for any other value."""
    return cast(Mapping[str, Any], value) if isinstance(value, Mapping) else {}


def items(value: object) -> list[object] | None:
    """Return the items of a list; None for any other value."""
    return cast(list[object], value) if isinstance(value, list) else None
