"""Noteworthy lines of a trace for people: attach and detach, versions, batches, every loss.

The normal life of each group is left out.
"""

from collections import deque
from typing import Any

import msgspec

from staleflow.trace.events import Auth, Pull, Release, TraceEvent

QUIET = frozenset(("reserve", "promote", "push", "occupy", "claim", "deliver", "consume"))
"""Kinds of lines that are the normal life of a group, or that repeat another line."""
LOSSES = ("expired", "aborted", "overdue", "rollback")
"""Reasons of a release that mean a failure; the others are policy."""
ROUTINE = ("publish", "seal", "checkpoint")
"""Kinds of lines that come with every step, even of a healthy run."""
LONG_FIELDS = ("members", "segments", "recovered")
"""Fields that are left out."""


def noteworthy(event: TraceEvent) -> bool:
    """Return whether an event is worth showing to a person."""
    match event:
        case Release():
            return event.why in LOSSES
        case Auth() | Pull():
            return not event.ok
        case _:
            return event.__struct_config__.tag not in QUIET


def brief(event: TraceEvent, unix_ns: int) -> dict[str, Any] | None:
    """Return ``event`` as a trace line without its long fields; None if it is not noteworthy."""
    if not noteworthy(event):
        return None
    line: dict[str, Any] = msgspec.to_builtins(event)
    return {"t": unix_ns, **{key: value for key, value in line.items() if key not in LONG_FIELDS}}


class Recent:
    """The last noteworthy lines. Routine lines of every step evict only each other, never rare events."""

    def __init__(self) -> None:
        self._routine: deque[dict[str, Any]] = deque(maxlen=24)
        self._others: deque[dict[str, Any]] = deque(maxlen=40)

    def add(self, line: dict[str, Any]) -> None:
        (self._routine if line["ev"] in ROUTINE else self._others).append(line)

    def lines(self) -> list[dict[str, Any]]:
        """Return the kept lines, newest last."""
        return sorted((*self._others, *self._routine), key=lambda line: int(line["t"]))
