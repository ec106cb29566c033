"""Noteworthy lines of a trace for people: attach and detach, versions, batches, every loss.

The normal life of each group is left out.
"""

from collections import deque
from collections.abc import Mapping
from typing import Any, get_args

import msgspec

from staleflow.trace.events import AnyEvent, TraceEvent

QUIET = frozenset(("reserve", "promote", "push", "occupy", "claim", "deliver", "consume"))
"""Kinds of lines that are the normal life of a group, or that repeat another line."""
LOSSES = ("expired", "aborted", "overdue", "rollback")
"""Reasons of a release that mean a failure; the others are policy."""
ROUTINE = ("publish", "seal", "checkpoint")
"""Kinds of lines that come with every step, even of a healthy run."""
LONG_FIELDS = ("members", "segments", "recovered")
"""Fields that are left out."""

_NOTEWORTHY = frozenset(kind for kind in get_args(AnyEvent) if kind.__struct_config__.tag not in QUIET)


def noteworthy(line: Mapping[str, Any]) -> bool:
    """Return whether a line is worth showing to a person."""
    kind = line["ev"]
    if kind == "release":
        return line["why"] in LOSSES
    return not line["ok"] if kind in ("auth", "pull") else kind not in QUIET


def brief(event: TraceEvent, unix_ns: int) -> dict[str, Any] | None:
    """Return ``event`` as a trace line without its long fields; None if it is not noteworthy."""
    if type(event) not in _NOTEWORTHY:
        return None
    line: dict[str, Any] = msgspec.to_builtins(event)
    return {"t": unix_ns, **short(line)} if noteworthy(line) else None


def short(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return a line without its long fields."""
    return {key: value for key, value in line.items() if key not in LONG_FIELDS}


class Recent:
    """The last noteworthy lines. Routine lines of every step evict only each other, never rare events."""

    def __init__(self, routine: int = 24, others: int = 40) -> None:
        """``routine`` and ``others`` limit the lines kept of each sort."""
        self._routine: deque[dict[str, Any]] = deque(maxlen=routine)
        self._others: deque[dict[str, Any]] = deque(maxlen=others)

    def add(self, line: dict[str, Any]) -> None:
        (self._routine if line["ev"] in ROUTINE else self._others).append(line)

    def lines(self) -> list[dict[str, Any]]:
        """Return the kept lines, newest last."""
        return sorted((*self._others, *self._routine), key=lambda line: int(line["t"]))
