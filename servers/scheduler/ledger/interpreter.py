"""Interpreter of the ledger: apply events, execute their effects in order, and group-commit the results.

- Each effect is written to the trace and then passed to the listeners of its type.
- ``commit`` makes the changed groups, the prompt queue, the totals and the trace durable in one transaction. No reply
  that depends on them may be sent before it returns True.
- A failed commit restores ledger, queue and totals from the store. No commit is attempted until a probe has shown that
  the store accepts writes.
"""

import logging
from collections.abc import Callable
from typing import Any

import msgspec

from staleflow.process.clock import WALL, Clock
from staleflow.protocols.consistency.effects import Effect
from staleflow.protocols.consistency.events import Event
from staleflow.protocols.consistency.limits import Limits
from staleflow.protocols.consistency.machine import Machine
from staleflow.servers.scheduler.ledger.totals import Totals
from staleflow.servers.scheduler.prompts import queue as prompt_queue
from staleflow.servers.scheduler.prompts.queue import PromptQueue
from staleflow.store.base import (
    FULL_SHARE,
    Read,
    Store,
    StoreCorrupt,
    StoreError,
    StoreFull,
    Write,
    key_number,
    number_key,
)
from staleflow.store.disk_errors import Resource
from staleflow.trace import writer as trace
from staleflow.trace.events import Open, event_of
from staleflow.trace.writer import Trace

log = logging.getLogger(__name__)

GROUPS = "groups"
"""Table of the ledger's rows."""
TABLES = ("meta", GROUPS, "workers", "room", *trace.TABLES, *prompt_queue.TABLES)

_OVERLOAD_END_SHARE = 0.85
"""Overload ends below this used share of the map. Below ``FULL_SHARE``, so that the state does not flap."""

_PROBE_BYTES = 65_536
"""Bytes that a probe writes and deletes: several pages of the map."""

_LEDGER = b"ledger"
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[int | str | bool]).decode


class Interpreter:
    """The only component that applies events to the ledger and writes to the store."""

    def __init__(self, store: Store, limits: Limits, trace: Trace, prompts: PromptQueue, clock: Clock = WALL) -> None:
        self.store = store
        self.clock = clock
        self.limits = limits
        self.trace = trace
        self.prompts = prompts
        self.totals = Totals()
        self.machine = Machine(limits)
        self._rows = LedgerRows()
        self.full: Resource = ""
        """The exhausted or failing resource of the store, or ""."""
        self.failed = False
        """A commit failed, and no probe has succeeded since."""
        self._overload_traced = self._overload_committed = False
        """The trace reports overload: including uncommitted lines, and as of the last commit."""
        self._opening: Open | None = None
        self._listeners: dict[type, list[Callable[[Any], None]]] = {}
        self._extra: list[Callable[[Write], None]] = []
        self._touched = False
        self.load()
        self._started_ms, self._served_before_s = self.clock.now_ms(), self.totals.counts.served_s

    @property
    def served_s(self) -> float:
        """Seconds that all incarnations of the scheduler have served the run."""
        return self._served_before_s + (self.clock.now_ms() - self._started_ms) / 1000

    def listen(self, effect: type, listener: Callable[[Any], None]) -> None:
        """Call ``listener`` with every effect of that type. A listener updates its own state; it applies no events."""
        self._listeners.setdefault(effect, []).append(listener)

    def load(self) -> None:
        """Restore ledger, queue and totals as of the last commit."""
        with self.store.read() as txn:
            self.machine = self._rows.load(txn, self.limits, self.clock.now_ms())
            self.prompts.load(txn)
            self.totals.load(txn)
        self._touched = False

    def apply(self, event: Event) -> tuple[Effect, ...]:
        """Apply one event; trace its effects and notify listeners in order. The next commit makes them durable."""
        effects = self.machine.apply(event, self.clock.now_ms())
        for effect in effects:
            if (line := event_of(effect)) is not None:
                self._touched = True
                self.trace.add(line)
            for listener in self._listeners.get(type(effect), ()):
                listener(effect)
        return effects

    def open(self, line: Open) -> None:
        """Start the trace of this incarnation. This line is durable before any other line of the incarnation."""
        self._opening = line
        self.trace.add(line)

    def with_commit(self, write: Callable[[Write], None]) -> None:
        """Call ``write`` in the next transaction; it is called again if the commit fails."""
        self._extra.append(write)

    @property
    def dirty(self) -> bool:
        """True if uncommitted changes exist."""
        return self._touched or self.trace.waiting or bool(self._extra) or self.prompts.changed

    def check_room(self) -> tuple[bool, float] | None:
        """Update the overload state; return (on, used share of the map) if it changed, else None.

        Overload starts at 90 % of the map or after a failed commit. It ends below 85 % once the store accepts writes.
        """
        used = self.store.used_share()
        if not self._overload_traced and (self.full or used >= FULL_SHARE):
            self.full = self.full or "map"
            self._overload_traced = True
            return True, used
        if self._overload_traced and used < _OVERLOAD_END_SHARE and not self.failed:
            self.full = ""
            self._overload_traced = False
            return False, used
        return None

    def probe(self) -> None:
        """After a failed commit, check whether the store accepts writes again, and commit the pending trace lines."""
        try:
            # Writing first lets the trace remove lines from the store that are in its file already, which frees pages.
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
            log.debug("the store still rejects writes: %s", error)
            self._undo()
        except BaseException:
            self.trace.forget()
            raise
        else:
            self.failed = False
            log.info("the store accepts writes again")

    def commit(self) -> bool:
        """Make all changes since the last commit durable. Return False if that failed; the changes are then undone."""
        if not self.dirty:
            return True
        try:
            with self.store.write() as txn:
                self._write(txn)
        except StoreCorrupt:
            self.trace.forget()
            raise
        except StoreError as error:
            log.error("commit failed, new work is refused until the store accepts writes again: %s", error)
            self._undo()
            self.load()
            self.full = error.resource if isinstance(error, StoreFull) else "failing"
            self.failed = True
            return False
        except BaseException:
            # The process ends. Closing the trace would write these lines, which the store does not have, and no
            # scheduler could resume the run.
            self.trace.forget()
            raise
        self._written()
        return True

    def _undo(self) -> None:
        """Discard the trace lines since the last commit, except the ``open`` line of this incarnation."""
        self.trace.forget()
        self._overload_traced = self._overload_committed
        if self._opening is not None:
            self.trace.add(self._opening)

    def _written(self) -> None:
        """Update the state after a durable transaction, and write its trace lines to the file."""
        self._opening = None
        self._overload_committed = self._overload_traced
        self._touched = False
        self._extra.clear()
        self.prompts.saved()
        try:
            self.trace.committed()
        except OSError as error:  # the lines stay in the store, and the next commit writes them
            log.warning("%s lags behind the store: %s", self.trace.path, error)

    def _write(self, txn: Write) -> None:
        if self._touched:
            self._rows.save(txn, self.machine)
            self.totals.counts.served_s = self.served_s
            self.totals.save(txn)
        self.prompts.save(txn)
        for write in self._extra:
            write(txn)
        self.trace.commit(txn)


class LedgerRows:
    """Reader and writer of the ledger's rows in the store; knows the place of each row.

    Rows that change together share pages. Group ids arrive in shuffled order, so keys by group would dirty one page of
    the map per row; leases arrive in order.
    """

    def __init__(self) -> None:
        self._places: dict[int, int] = {}

    def save(self, txn: Write, machine: Machine) -> None:
        """Write the changed rows and the globals."""
        places = self._places
        for key in machine.take_dirty():
            row = machine.row(key)
            before = places.get(key)
            place = -1 if row is None else machine.place(key)
            if before is not None and before != place:  # deleted, or leased again at another place
                del places[key]
                txn.delete(GROUPS, number_key(before))
            if row is not None:
                places[key] = place
                txn.put(GROUPS, number_key(place), _encode((key, *row)))
        txn.put("meta", _LEDGER, _encode(machine.globals_row()))

    def load(self, txn: Read, limits: Limits, now_ms: int) -> Machine:
        """Return the last saved machine and remember the places of its rows; a new machine if nothing was saved."""
        self._places.clear()
        raw = txn.get("meta", _LEDGER)
        if raw is None:
            return Machine(limits)
        rows: dict[int, list[int | str | bool]] = {}
        for place, stored in txn.items(GROUPS):
            key, *row = _decode(stored)
            self._places[int(key)] = key_number(place)
            rows[int(key)] = row
        return Machine.restore(limits, _decode(raw), rows.items(), now_ms)
