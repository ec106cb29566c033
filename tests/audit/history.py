"""The history that a trace records, as plain tables in the words of the witnesses, made from ``trace.jsonl`` alone."""

import json
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Key = tuple[int, int]
"""(group, lease)."""
VersionKey = tuple[int, int]
"""(lineage, version)."""


@dataclass(slots=True)
class History:
    """Tables of one run, each filled in the order of the trace's lines."""

    leases: dict[int, tuple[int, str]] = field(default_factory=dict[int, tuple[int, str]])
    """Lease -> group, worker."""
    leases_of: dict[int, list[int]] = field(default_factory=lambda: defaultdict[int, list[int]](list))
    pushes: dict[Key, dict[str, Any]] = field(default_factory=dict[Key, dict[str, Any]])
    released: dict[Key, str] = field(default_factory=dict[Key, str])
    dropped: set[int] = field(default_factory=set[int])
    seals: dict[int, dict[str, Any]] = field(default_factory=dict[int, dict[str, Any]])
    published: dict[VersionKey, dict[str, Any]] = field(default_factory=dict[VersionKey, dict[str, Any]])
    consumed: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """Consumed batches of the surviving history; a rollback removes the batches that it took back."""
    terms: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """(seq, term) of each join."""
    by_term: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """(seq, term) of each line that only the current trainer may cause."""
    fresh: list[bool] = field(default_factory=list[bool])
    """For each lease in order: True if its number is higher than the numbers of all earlier leases."""
    trained_in: dict[int, int] = field(default_factory=dict[int, int])
    """Group -> step, of the surviving history."""
    checkpoint: int = 0
    """Version of the last checkpoint."""
    max_staleness: int = 0

    def gone(self, group: int, lease: int) -> bool:
        """True if the run has given up these bytes, so that a store may have deleted them."""
        if (group, lease) in self.released or group in self.dropped:
            return True
        if any(later > lease and (group, later) in self.pushes for later in self.leases_of[group]):
            return True
        return self.trained_in.get(group, self.checkpoint) < self.checkpoint

    @property
    def batches(self) -> list[dict[str, Any]]:
        """Return the seals that the surviving history trained, in order."""
        return [self.seals[line["batch"]] for line in self.consumed]


def read(trace: Path) -> History:
    """Return the history recorded by the complete lines of a trace."""
    history = History()
    for line in trace.read_bytes().split(b"\n")[:-1]:
        event = json.loads(line)
        _TAKE.get(event["ev"], _nothing)(history, event)
    for seal in history.batches:
        history.trained_in |= {member["group"]: seal["step"] for member in seal["members"]}
    return history


def _nothing(history: History, event: dict[str, Any]) -> None:
    pass


def _open(history: History, event: dict[str, Any]) -> None:
    history.max_staleness = event["max_staleness"]


def _reserve(history: History, event: dict[str, Any]) -> None:
    history.fresh.append(event["lease"] > next(reversed(history.leases), 0))
    history.leases[event["lease"]] = event["group"], event["worker"]
    history.leases_of[event["group"]].append(event["lease"])


def _push(history: History, event: dict[str, Any]) -> None:
    history.pushes[event["group"], event["lease"]] = event


def _release(history: History, event: dict[str, Any]) -> None:
    history.released[event["group"], event["lease"]] = event["why"]


def _drop(history: History, event: dict[str, Any]) -> None:
    history.dropped.add(event["group"])


def _seal(history: History, event: dict[str, Any]) -> None:
    history.seals[event["batch"]] = event


def _publish(history: History, event: dict[str, Any]) -> None:
    history.published[event["lineage"], event["version"]] = event
    history.by_term.append((event["seq"], event["trainer_term"]))


def _consume(history: History, event: dict[str, Any]) -> None:
    history.consumed.append(event)
    history.by_term.append((event["seq"], event["trainer_term"]))


def _checkpoint(history: History, event: dict[str, Any]) -> None:
    history.checkpoint = event["version"]
    history.by_term.append((event["seq"], event["trainer_term"]))


def _deliver(history: History, event: dict[str, Any]) -> None:
    history.by_term.append((event["seq"], event["trainer_term"]))


def _join(history: History, event: dict[str, Any]) -> None:
    history.terms.append((event["seq"], event["trainer_term"]))


def _rollback(history: History, event: dict[str, Any]) -> None:
    history.consumed = [line for line in history.consumed if line["step"] < event["to_version"]]


_TAKE = {
    "open": _open,
    "reserve": _reserve,
    "push": _push,
    "release": _release,
    "drop": _drop,
    "seal": _seal,
    "publish": _publish,
    "consume": _consume,
    "checkpoint": _checkpoint,
    "deliver": _deliver,
    "join": _join,
    "rollback": _rollback,
}
