"""Events in; effects carried out in order; one transaction a group commit.

- Each effect becomes a line of the trace and then goes to whoever asked to hear of its kind.
- ``commit`` makes the changed groups, the deck, the totals and the trace durable together. Until it returns True no
  answer that depends on them may leave.
- When a commit fails, everything goes back to the last one: ledger, deck and totals are read from the store, and no
  other is tried before a probe says that the store takes writes again.
"""

import logging
from collections.abc import Callable
from typing import Any

from staleflow.process.clock import WALL, Clock
from staleflow.protocols.consistency.effects import Effect
from staleflow.protocols.consistency.events import Event
from staleflow.protocols.consistency.limits import Limits
from staleflow.protocols.consistency.machine import Machine
from staleflow.servers.scheduler.ledger import rows as ledger_rows
from staleflow.servers.scheduler.ledger.rows import LedgerRows
from staleflow.servers.scheduler.ledger.totals import Totals
from staleflow.servers.scheduler.prompts import queue as deck
from staleflow.servers.scheduler.prompts.queue import Deck
from staleflow.store.base import FULL_SHARE, Store, StoreCorrupt, StoreError, StoreFull, Write
from staleflow.store.disk_errors import Resource
from staleflow.trace import writer as trace
from staleflow.trace.events import EVENT_OF, Open
from staleflow.trace.writer import Trace

log = logging.getLogger(__name__)

TABLES = ("meta", ledger_rows.TABLE, "workers", "room", *trace.TABLES, *deck.TABLES)

_ROOM_AGAIN = 0.85
"""Overload ends below this share of the map."""

_PROBE_BYTES = 65_536


class Interpreter:
    """The only one who applies events to the ledger and writes to the store."""

    def __init__(self, store: Store, limits: Limits, trace: Trace, deck: Deck, clock: Clock = WALL) -> None:
        self.store = store
        self.clock = clock
        self.limits = limits
        self.trace = trace
        self.deck = deck
        self.totals = Totals()
        self.machine = Machine(limits)
        self._rows = LedgerRows()
        self.full: Resource = ""
        """What keeps the store from taking writes, or nothing."""
        self.failed = False
        """A commit failed, and the store was not seen to take writes since."""
        self._told = self._told_durably = False
        """Overload has begun, and the trace says so: with the next commit, and as it was committed last."""
        self._opening: Open | None = None
        self._listeners: dict[type, list[Callable[[Any], None]]] = {}
        self._extra: list[Callable[[Write], None]] = []
        self._touched = False
        self.load()
        self._started_ms, self._served_before_s = self.clock.now_ms(), self.totals.counts.served_s

    @property
    def served_s(self) -> float:
        """Seconds that this scheduler and the ones before it have served the run."""
        return self._served_before_s + (self.clock.now_ms() - self._started_ms) / 1000

    def listen(self, effect: type, listener: Callable[[Any], None]) -> None:
        """Call ``listener`` with every effect of that type. It may note things; it may not apply events."""
        self._listeners.setdefault(effect, []).append(listener)

    def load(self) -> None:
        """Become what was committed last."""
        with self.store.read() as txn:
            self.machine = self._rows.load(txn, self.limits, self.clock.now_ms())
            self.deck.load(txn)
            self.totals.load(txn)
        self._touched = False

    def apply(self, event: Event) -> tuple[Effect, ...]:
        """Apply one event; its effects are traced and told in order, and durable with the next commit."""
        effects = self.machine.apply(event, self.clock.now_ms())
        for effect in effects:
            kind = type(effect)
            line = EVENT_OF.get(kind)
            if line is not None:
                self._touched = True
                self.trace.add(line(effect))
            for listener in self._listeners.get(kind, ()):
                listener(effect)
        return effects

    def open(self, line: Open) -> None:
        """Begin the trace of this incarnation. Nothing else of it is durable before this line is."""
        self._opening = line
        self.trace.add(line)

    def with_commit(self, write: Callable[[Write], None]) -> None:
        """Let ``write`` take part in the next transaction."""
        self._extra.append(write)

    @property
    def dirty(self) -> bool:
        """Whether anything waits for a commit."""
        return self._touched or self.trace.waiting or bool(self._extra) or self.deck.changed

    def look_at_room(self) -> tuple[bool, float] | None:
        """Overload begins (True) at 90 % of the map or after a failed commit, and ends (False) well below it."""
        used = self.store.used_share()
        if not self._told and (self.full or used >= FULL_SHARE):
            self.full = self.full or "map"
            self._told = True
            return True, used
        if self._told and used < _ROOM_AGAIN and not self.failed:
            self.full = ""
            self._told = False
            return False, used
        return None

    def probe(self) -> None:
        """After a failure: see whether the store takes writes again. What the trace's file has leaves the store."""
        try:
            with self.store.write() as txn:
                self._write(txn)
            self._written()
            with self.store.write() as txn:
                txn.put("room", b"probe", bytes(_PROBE_BYTES))
            with self.store.write() as txn:
                txn.delete("room", b"probe")
        except StoreCorrupt:
            self.trace.forget()
            raise
        except StoreError as error:
            log.debug("the store takes no writes yet: %s", error)
            self._forget()
        else:
            self.failed = False
            log.info("the store takes writes again")

    def commit(self) -> bool:
        """Make everything since the last commit durable; False when it could not be, and then it never happened."""
        if not self.dirty:
            return True
        try:
            with self.store.write() as txn:
                self._write(txn)
        except StoreCorrupt:
            self.trace.forget()
            raise
        except StoreError as error:
            log.error("commit failed, new work is refused until the store takes writes again: %s", error)
            self._forget()
            self.load()
            self.full = error.resource if isinstance(error, StoreFull) else "failing"
            self.failed = True
            return False
        self._written()
        return True

    def _forget(self) -> None:
        """The lines since the last commit never happened, but that an incarnation has begun."""
        self.trace.forget()
        self._told = self._told_durably
        if self._opening is not None:
            self.trace.add(self._opening)

    def _written(self) -> None:
        """A transaction is durable: its lines may go to the file."""
        self._opening = None
        self._told_durably = self._told
        self._touched = False
        self._extra.clear()
        self.deck.saved()
        try:
            self.trace.committed()
        except OSError as error:
            log.warning("%s lags: %s", self.trace.path, error)

    def _write(self, txn: Write) -> None:
        if self._touched:
            self._rows.save(txn, self.machine)
            self.totals.counts.served_s = self.served_s
            self.totals.save(txn)
        self.deck.save(txn)
        for write in self._extra:
            write(txn)
        self.trace.commit(txn)
