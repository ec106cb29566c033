"""Lines of ``metrics.jsonl`` as everybody reads them: by name what is a number, of a step that is one."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from staleflow.process.sanitize import MOST

MAX_STEP = 2**50

_decode = msgspec.json.Decoder(dict[str, Any]).decode


def metric_lines(path: Path) -> list[dict[str, Any]]:
    """All of them; no file is no lines."""
    try:
        return parsed(path.read_bytes().split(b"\n"))
    except FileNotFoundError:
        return []


def parsed(lines: Iterable[bytes]) -> list[dict[str, Any]]:
    """A line that is torn or strange is left out, and of a line what ``numbers`` leaves out."""
    found: list[dict[str, Any]] = []
    for line in lines:
        try:
            found.append(_decode(line))
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            continue
    return [numbers(line) for line in found if _is_step(line.get("step", 0))]


def numbers(line: Mapping[str, Any]) -> dict[str, Any]:
    """What of a line is a number, or is known to be none (None). A NaN or an infinity is not."""
    return {key: value for key, value in line.items() if value is None or _is_number(value)}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and -MOST <= value <= MOST


def _is_step(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -MAX_STEP <= value <= MAX_STEP
