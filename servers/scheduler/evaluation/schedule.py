"""Evaluations that are due: for each set at most one that runs and one that waits. Stored with the ledger's commits.

A set is due at version 0, at every ``every``-th version and at the last one. While its evaluation of an older version
runs, a newly due version waits, and replaces one that waits already.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec

from staleflow.configs.evals import EvalSet
from staleflow.protocols.consistency.ids import Lineage, Version
from staleflow.store.base import Read, Write

log = logging.getLogger(__name__)

_KEY = b"evaluations"


class Due(msgspec.Struct, frozen=True, kw_only=True):
    """One evaluation: a set and the version that is to play it."""

    set: str
    lineage: Lineage
    version: Version

    @property
    def weights(self) -> tuple[Lineage, Version]:
        return self.lineage, self.version

    def __str__(self) -> str:
        return f"{self.set} at version {self.version}"


class _Stored(msgspec.Struct, frozen=True, kw_only=True):
    running: list[Due]
    waiting: list[Due]


class Schedule:
    """Decides which evaluations run."""

    def __init__(self, sets: Sequence[EvalSet], steps: int) -> None:
        """``steps``: the last version."""
        self._sets = sets
        self._steps = steps
        self._running: dict[str, Due] = {}
        self._waiting: dict[str, Due] = {}

    def load(self, txn: Read) -> None:
        """Continue with the stored evaluations, except those of sets that no longer exist."""
        raw = txn.get("meta", _KEY)
        if raw is not None:
            stored = msgspec.msgpack.decode(raw, type=_Stored)
            names = {given.name for given in self._sets}
            self._running = {due.set: due for due in stored.running if due.set in names}
            self._waiting = {due.set: due for due in stored.waiting if due.set in names}

    def save(self, txn: Write) -> None:
        """Write the evaluations that are not finished."""
        stored = _Stored(running=[*self._running.values()], waiting=[*self._waiting.values()])
        txn.put("meta", _KEY, msgspec.msgpack.encode(stored))

    @property
    def running(self) -> Mapping[str, Due]:
        """The running evaluation of each set, in the order in which they became due."""
        return self._running

    def unfinished(self) -> Iterator[Due]:
        """Return every evaluation that runs or waits."""
        return iter((*self._running.values(), *self._waiting.values()))

    def published(self, lineage: Lineage, version: Version) -> bool:
        """Add the sets that are due at a new version; return whether there are any."""
        names = [given.name for given in self._sets if self._is_due(given, version)]
        for name in names:
            due = Due(set=name, lineage=lineage, version=version)
            if name not in self._running:
                self._running[name] = due
                continue
            if (skipped := self._waiting.pop(name, None)) is not None:
                log.warning("evaluation %s skipped: the one at version %d runs", skipped, self._running[name].version)
            self._waiting[name] = due
        return bool(names)

    def _is_due(self, given: EvalSet, version: Version) -> bool:
        return version in (0, self._steps) or (given.every > 0 and version % given.every == 0)

    def finish(self, name: str) -> None:
        """Remove the running evaluation of a set; the waiting one runs next."""
        self._running.pop(name, None)
        if (due := self._waiting.pop(name, None)) is not None:
            self._running[name] = due

    def discard(self, is_over: Callable[[Due], bool]) -> list[Due]:
        """Remove and return the evaluations for which ``is_over`` is true."""
        gone = [due for due in self.unfinished() if is_over(due)]
        for name, due in list(self._waiting.items()):
            if due in gone:
                del self._waiting[name]
        for name, due in list(self._running.items()):
            if due in gone:
                self.finish(name)
        return gone
