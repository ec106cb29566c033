"""The queue of one stage: which groups wait for it, who works on which, and whose answer still counts.

- A worker takes a group with a ticket. Only the newest ticket of a group can finish it.
- A ticket ends when its worker is gone, has failed, or has used up its time. The group is then first in the queue
  again, for a worker that has not failed it yet; where there is none, for the same worker after a back-off.
- A group leaves the queue for good after ``MAX_TRIES`` such tries, or when every one of several workers has failed it.
- A worker that fails ``HOLD_AFTER`` groups in a row is held: it gets nothing for a time that doubles with each other
  group that it fails, then one group as a probe. Its first success ends that. Without the hold the worker that fails at
  once is always free, is always served first, and takes the groups of the workers that do their work.
- A probe is a group that the worker has not failed yet, if one waits, and a repeated failure of one group lengthens no
  hold: where single groups are bad, they are soon all that is left, and prove nothing about their worker.
- A worker may take more while it has some: a ticket lasts for those before it.

Pure: time comes in as ``now_s``.
"""

import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, islice

from staleflow.protocols.consistency.ids import GroupId
from staleflow.servers.trajectories.records import Key

MAX_TRIES = 3
"""Tries of a group that may fail, or vanish with their worker, before it is given up."""
HOLD_AFTER = 3
"""Failures in a row that hold a worker: fewer are likely where single groups are bad and the worker is not."""
MIN_HOLD_S, MAX_HOLD_S = 1.0, 60.0
MAX_WORKERS = 1024
"""Workers that are known at once."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """The right to finish one group."""

    number: int
    key: Key
    worker: str
    until_s: float


@dataclass(frozen=True, slots=True)
class Failing:
    """A worker that has failed every group since its last success, ``HOLD_AFTER`` at least."""

    worker: str
    failures: int
    since_s: float
    held_until_s: float
    why: str
    """Of the newest failure."""


@dataclass(slots=True)
class _Worker:
    has: int = 0
    calls: int = 0
    """Most calls of user code that it has under way at once; 0: unknown."""
    failures: int = 0
    """Groups that it has failed since its last success, each counted once."""
    since_s: float = 0.0
    """When the first of these was."""
    why: str = ""
    holds: int = 0
    """Since its last success."""
    held_until_s: float = 0.0
    held_from: int = 0
    """First ticket of the time after the newest hold began; older ones were out already and lengthen no hold."""


@dataclass(slots=True)
class _Tries:
    """The failed tries of one group."""

    count: int = 0
    workers: set[str] = field(default_factory=set[str])
    not_before_s: float = 0.0
    """For a worker that has failed it already."""


class StageQueue:
    """One stage. ``first_ticket`` must differ from that of an earlier process."""

    def __init__(self, first_ticket: int) -> None:
        self._next = first_ticket
        self._waiting: OrderedDict[Key, None] = OrderedDict()
        self._taken: dict[Key, Ticket] = {}
        self._workers: dict[str, _Worker] = {}
        """Those that asked and are not gone."""
        self._tries: dict[Key, _Tries] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def taken(self) -> int:
        """Groups that a worker has."""
        return len(self._taken)

    @property
    def calls(self) -> int:
        """Most calls of user code that all workers together have under way at once; 0: unknown."""
        return sum(worker.calls for worker in self._workers.values())

    def first(self, most: int) -> list[GroupId]:
        """Groups that workers have, then those that wait, the longest waiting first; no more than so many."""
        return [key.group for key in islice(chain(self._taken, self._waiting), most)]

    def failing(self) -> list[Failing]:
        """The workers that are held, or are being probed."""
        return [
            Failing(name, worker.failures, worker.since_s, worker.held_until_s, worker.why)
            for name, worker in self._workers.items()
            if worker.holds
        ]

    def add(self, key: Key) -> None:
        """A group is ready for this stage."""
        self._waiting[key] = None

    def ask(self, worker: str, calls: int = 0) -> None:
        """Know a worker that asks for groups, with the ``calls`` that it has under way at most."""
        self._known(worker).calls = calls

    def take(self, worker: str, most: int, *, now_s: float, seconds_each: float, at_once: int = 1) -> list[Ticket]:
        """The longest waiting groups that this worker may have, at most ``most``; it makes ``at_once`` of them side by
        side, behind what it has."""
        one = self._known(worker)
        if one.holds:
            most = 0 if one.has or now_s < one.held_until_s else 1
        keys = list(islice(self._for(worker, now_s, fresh_first=bool(one.holds)), most))
        until_s = now_s + math.ceil((one.has + len(keys)) / at_once) * seconds_each
        tickets: list[Ticket] = []
        for key in keys:
            del self._waiting[key]
            ticket = self._taken[key] = Ticket(self._next, key, worker, until_s)
            self._next += 1
            tickets.append(ticket)
        one.has += len(keys)
        return tickets

    def holds(self, ticket: Ticket) -> bool:
        """True while this ticket counts."""
        return self._taken.get(ticket.key) == ticket

    def give_back(self, tickets: Iterable[Ticket]) -> None:
        """Groups that did not reach their worker: first in the queue again, as if never taken."""
        for ticket in sorted(tickets, key=lambda ticket: ticket.number, reverse=True):
            if self.holds(ticket):
                self._end(ticket)
                self._put_first(ticket.key)

    def finish(self, key: Key, number: int, worker: str) -> bool:
        """True if this ticket counts and is that worker's; the group has left the queue then."""
        if (ticket := self._current(key, number, worker)) is None:
            return False
        self.forget(key)
        one = self._known(ticket.worker)
        one.failures, one.holds = 0, 0
        return True

    def fail(self, key: Key, number: int, worker: str, why: str, *, now_s: float) -> bool | None:
        """True if the group is given up and has left the queue, False if it is tried again; None: this ticket does not
        count, or is not that worker's."""
        if (ticket := self._current(key, number, worker)) is None:
            return None
        self._failed(ticket, why, now_s)
        return self._tried(ticket, now_s)

    def lose(self, worker: str) -> list[Key]:
        """A worker is gone; return the groups that were tried too often and have left the queue."""
        lost = [ticket for ticket in self._taken.values() if ticket.worker == worker]
        for ticket in lost:
            self._end(ticket)
        self._workers.pop(worker, None)
        return [ticket.key for ticket in reversed(lost) if self._tried(ticket)]

    def expire(self, now_s: float) -> list[Key]:
        """Time passes; return the groups that were tried too often and have left the queue."""
        late = [ticket for ticket in self._taken.values() if ticket.until_s <= now_s]
        for ticket in late:
            self._failed(ticket, "it took too long", now_s)
        return [ticket.key for ticket in reversed(late) if self._tried(ticket, now_s)]

    def forget(self, key: Key) -> None:
        """The group is no longer wanted, wherever it is."""
        self._tries.pop(key, None)
        if (ticket := self._taken.get(key)) is not None:
            self._end(ticket)
        else:
            self._waiting.pop(key, None)

    def _known(self, worker: str) -> _Worker:
        if (found := self._workers.get(worker)) is None:
            idle = [name for name, one in self._workers.items() if not one.has]
            for name in idle[: max(0, len(self._workers) + 1 - MAX_WORKERS)]:
                del self._workers[name]
            found = self._workers[worker] = _Worker()
        return found

    def _current(self, key: Key, number: int, worker: str) -> Ticket | None:
        ticket = self._taken.get(key)
        return None if ticket is None or ticket.number != number or ticket.worker != worker else ticket

    def _for(self, worker: str, now_s: float, *, fresh_first: bool) -> Iterator[Key]:
        """Yield the groups that this worker may have, longest waiting first; or those first that it has not failed."""
        possible = (key for key in self._waiting if self._may_have(worker, key, now_s))
        if not fresh_first:
            return possible
        fresh = (key for key in self._waiting if not self._has_failed(worker, key))
        return chain(fresh, possible)  # a probe takes the first one only

    def _has_failed(self, worker: str, key: Key) -> bool:
        tries = self._tries.get(key)
        return tries is not None and worker in tries.workers

    def _may_have(self, worker: str, key: Key, now_s: float) -> bool:
        tries = self._tries.get(key)
        if tries is None or worker not in tries.workers:
            return True
        others = any(name not in tries.workers and not one.holds for name, one in self._workers.items())
        return not others and now_s >= tries.not_before_s

    def _failed(self, ticket: Ticket, why: str, now_s: float) -> None:
        """End the ticket of a worker that has nothing for its group, and hold the worker if it fails them all."""
        self._end(ticket)
        one = self._known(ticket.worker)
        one.since_s = one.since_s if one.failures else now_s
        again = self._has_failed(ticket.worker, ticket.key)
        one.failures += not again
        one.why = why
        if one.failures >= HOLD_AFTER and ticket.number >= one.held_from:
            one.holds += not (again and one.holds)
            one.held_until_s = now_s + min(MIN_HOLD_S * 2.0 ** (one.holds - 1), MAX_HOLD_S)
            one.held_from = self._next

    def _tried(self, ticket: Ticket, failed_s: float | None = None) -> bool:
        """Count a try that came to nothing; queue the group again, or return True when it is given up.

        ``failed_s``: when its worker failed it; None: the worker has vanished, which says nothing about the group.
        """
        tries = self._tries.setdefault(ticket.key, _Tries())
        tries.count += 1
        if failed_s is not None:
            tries.workers.add(ticket.worker)
            tries.not_before_s = failed_s + MIN_HOLD_S * 2.0 ** (tries.count - 1)
        everyone = len(self._workers) > 1 and all(name in tries.workers for name in self._workers)
        if tries.count >= MAX_TRIES or everyone:
            del self._tries[ticket.key]
            return True
        self._put_first(ticket.key)
        return False

    def _put_first(self, key: Key) -> None:
        self._waiting[key] = None
        self._waiting.move_to_end(key, last=False)

    def _end(self, ticket: Ticket) -> None:
        del self._taken[ticket.key]
        self._workers[ticket.worker].has -= 1
