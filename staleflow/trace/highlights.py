"""Lines of a trace that a person wants to hear of as they happen: who comes and goes, versions, batches, every loss.

What happens to each group when all is well is not among them.
"""

from collections import deque
from collections.abc import Mapping
from typing import Any, get_args

import msgspec

from staleflow.trace.events import AnyEvent, TraceEvent

QUIET = frozenset(("reserve", "promote", "push", "occupy", "claim", "deliver", "consume"))
"""Kinds of lines that are the life of a group, or are told by another line."""
LOSSES = ("expired", "aborted", "overdue", "rollback")
"""Reasons of a release that are somebody's failure; the others are policy."""
ROUTINE = ("publish", "seal", "checkpoint")
"""Kinds of lines that come with every step, however well a run goes."""
LONG = ("members", "segments", "recovered")
"""Fields that are left out."""

_LOUD = frozenset(kind for kind in get_args(AnyEvent) if kind.__struct_config__.tag not in QUIET)


def noteworthy(line: Mapping[str, Any]) -> bool:
    """Whether a person wants to hear of this line."""
    kind = line["ev"]
    if kind == "release":
        return line["why"] in LOSSES
    return not line["ok"] if kind in ("auth", "pull") else kind not in QUIET


def brief(event: TraceEvent, unix_ns: int) -> dict[str, Any] | None:
    """``event`` as a line of the trace without its long fields; None when it is not noteworthy."""
    if type(event) not in _LOUD:
        return None
    line: dict[str, Any] = msgspec.to_builtins(event)
    return {"t": unix_ns, **short(line)} if noteworthy(line) else None


def short(line: Mapping[str, Any]) -> dict[str, Any]:
    """A line without its long fields."""
    return {key: value for key, value in line.items() if key not in LONG}


class Recent:
    """The last noteworthy lines. Those of every step drive out their own kind only, never what happens once a day."""

    def __init__(self, routine: int = 24, others: int = 40) -> None:
        """How many of each are kept."""
        self._routine: deque[dict[str, Any]] = deque(maxlen=routine)
        self._others: deque[dict[str, Any]] = deque(maxlen=others)

    def add(self, line: dict[str, Any]) -> None:
        (self._routine if line["ev"] in ROUTINE else self._others).append(line)

    def lines(self) -> list[dict[str, Any]]:
        """The newest last."""
        return sorted((*self._others, *self._routine), key=lambda line: int(line["t"]))
