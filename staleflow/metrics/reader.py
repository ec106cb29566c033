"""Read ``metrics.jsonl``: numbers by name, of lines with a valid step."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from staleflow.process.sanitize import MAX_MAGNITUDE

MAX_STEP = 2**50

_decode = msgspec.json.Decoder(dict[str, Any]).decode


def metric_lines(path: Path) -> list[dict[str, Any]]:
    """Return all lines; none if the file does not exist."""
    try:
        return parsed(path.read_bytes().split(b"\n"))
    except FileNotFoundError:
        return []


def parsed(lines: Iterable[bytes]) -> list[dict[str, Any]]:
    """Decode lines. Skip torn and invalid lines, and of a line the fields that ``numbers`` drops."""
    decoded: list[dict[str, Any]] = []
    for line in lines:
        try:
            decoded.append(_decode(line))
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            continue
    return [numbers(line) for line in decoded if _is_step(line.get("step", 0))]


def numbers(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that are numbers or None. NaN and infinities are dropped."""
    return {key: value for key, value in line.items() if value is None or _is_number(value)}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and -MAX_MAGNITUDE <= value <= MAX_MAGNITUDE


def _is_step(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -MAX_STEP <= value <= MAX_STEP
