"""Queue of one stage: waiting groups, groups in progress, and the tickets that are valid.

- A worker takes a group with a ticket. Only the newest ticket of a group can finish it.
- A ticket ends when its worker is lost, reports a failure, or exceeds its time limit. The group moves to the front of
  the queue, for a worker that has not failed it yet; if there is none, for the same worker after a back-off.
- A group leaves the queue for good after ``MAX_TRIES`` such tries, or when all of several workers have failed it.
- A worker that fails ``HOLD_AFTER`` groups in a row is held: it gets no group for a time that doubles with each further
  group that it fails, then one group as a probe. Its first success ends the hold. Without holds, a worker that fails at
  once is always idle, is always served first, and takes the groups of the workers that function.
- Every other probe is a group that the worker has not failed yet, if one waits, and a repeated failure of one group
  does not extend a hold: where individual groups are bad, they are soon the only ones left, and prove nothing about
  their worker. The probes between take the group with the most tries, then the one whose last failure is the oldest:
  where only bad groups are left, each that is given up returns at once under a new lease, and would be preferred.
- A worker may take more groups while it has some: the time limit of a ticket covers those before it.

Pure: time arrives as ``now_s``.
"""

import math
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain, islice

from staleflow.protocols.consistency.ids import GroupId
from staleflow.servers.trajectories.records import Key

MAX_TRIES = 3
"""Number of failed tries, lost workers included, after which a group is given up."""
HOLD_AFTER = 3
"""Consecutive failures after which a worker is held. Fewer are likely where groups are bad and the worker is not."""
MIN_HOLD_S, MAX_HOLD_S = 1.0, 60.0
MAX_WORKERS = 1024
"""Maximum number of workers tracked at once."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """Right to finish one group."""

    number: int
    key: Key
    worker: str
    until_s: float


@dataclass(frozen=True, slots=True)
class Failing:
    """Worker that has failed every group since its last success, at least ``HOLD_AFTER`` of them."""

    worker: str
    failures: int
    since_s: float
    held_until_s: float
    why: str
    """Error text of the newest failure."""


@dataclass(slots=True)
class _Worker:
    has: int = 0
    calls: int = 0
    """Maximum number of concurrent calls of user code of this worker; 0: unknown."""
    failures: int = 0
    """Groups failed since its last success, each counted once."""
    since_s: float = 0.0
    """Time of the first of these failures."""
    why: str = ""
    holds: int = 0
    """Holds since its last success."""
    probed_fresh: bool = False
    """The last probe was a group that it had not failed."""
    held_until_s: float = 0.0
    held_from: int = 0
    """First ticket number issued after the newest hold. Failures of older tickets were already in progress and
    extend no hold."""


@dataclass(slots=True)
class _Tries:
    """Failed tries of one group."""

    count: int = 0
    workers: set[str] = field(default_factory=set[str])
    not_before_s: float = 0.0
    """Earliest retry by a worker that has already failed the group."""


class StageQueue:
    """Queue of one stage. ``first_ticket`` must differ from that of an earlier process."""

    def __init__(self, first_ticket: int) -> None:
        self._next = first_ticket
        self._waiting: OrderedDict[Key, None] = OrderedDict()
        self._in_progress: dict[Key, Ticket] = {}
        self._workers: dict[str, _Worker] = {}
        """Workers that have called and are not lost."""
        self._tries: dict[Key, _Tries] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def taken(self) -> int:
        """Number of groups in progress."""
        return len(self._in_progress)

    @property
    def calls(self) -> int:
        """Maximum number of concurrent calls of user code of all workers together; 0: unknown."""
        return sum(worker.calls for worker in self._workers.values())

    def first(self, most: int) -> list[GroupId]:
        """Return at most ``most`` groups: those in progress first, then the waiting ones in queue order."""
        return [key.group for key in islice(chain(self._in_progress, self._waiting), most)]

    def failing(self) -> list[Failing]:
        """Return the workers that are held or being probed."""
        return [
            Failing(name, worker.failures, worker.since_s, worker.held_until_s, worker.why)
            for name, worker in self._workers.items()
            if worker.holds
        ]

    def add(self, key: Key) -> None:
        """Queue a group."""
        self._waiting[key] = None

    def ask(self, worker: str, calls: int = 0) -> None:
        """Register a worker that requests groups, with its maximum number of concurrent ``calls``."""
        self._worker(worker).calls = calls

    def take(self, worker: str, most: int, *, now_s: float, seconds_each: float, at_once: int = 1) -> list[Ticket]:
        """Take at most ``most`` groups for this worker, the longest waiting first.

        ``at_once``: number of groups that the worker processes concurrently, after those that it has already.
        """
        one = self._worker(worker)
        if one.holds:
            keys = [] if one.has or now_s < one.held_until_s else self._probe(worker, now_s)[:most]
        else:
            keys = [*islice((key for key in self._waiting if self._may_have(worker, key, now_s)), most)]
        until_s = now_s + math.ceil((one.has + len(keys)) / at_once) * seconds_each
        tickets: list[Ticket] = []
        for key in keys:
            del self._waiting[key]
            ticket = self._in_progress[key] = Ticket(self._next, key, worker, until_s)
            self._next += 1
            tickets.append(ticket)
        one.has += len(keys)
        return tickets

    def holds(self, ticket: Ticket) -> bool:
        """Return True while this ticket is valid."""
        return self._in_progress.get(ticket.key) == ticket

    def give_back(self, tickets: Iterable[Ticket]) -> None:
        """Return undelivered groups to the front of the queue, as if they had never been taken."""
        # Newest first: each is put at the front, so the oldest ends up first.
        for ticket in sorted(tickets, key=lambda ticket: ticket.number, reverse=True):
            if self.holds(ticket):
                self._end(ticket)
                self._put_first(ticket.key)

    def finish(self, key: Key, number: int, worker: str) -> bool:
        """Finish a group. Return False if the ticket is not valid or belongs to another worker."""
        if (ticket := self._current(key, number, worker)) is None:
            return False
        self.forget(key)
        one = self._worker(ticket.worker)
        one.failures, one.holds = 0, 0
        return True

    def fail(self, key: Key, number: int, worker: str, why: str, *, now_s: float) -> bool | None:
        """Record a failure. Return True if the group is given up and has left the queue, False if it will be
        retried, and None if the ticket is not valid or belongs to another worker."""
        if (ticket := self._current(key, number, worker)) is None:
            return None
        self._failed(ticket, why, now_s)
        return self._count_try(ticket, now_s)

    def lose(self, worker: str) -> list[Key]:
        """Remove a lost worker; return the groups that were given up and have left the queue."""
        lost = [ticket for ticket in self._in_progress.values() if ticket.worker == worker]
        for ticket in lost:
            self._end(ticket)
        self._workers.pop(worker, None)
        return [ticket.key for ticket in reversed(lost) if self._count_try(ticket)]

    def expire(self, now_s: float) -> list[Key]:
        """Expire tickets; return the groups that were given up and have left the queue."""
        late = [ticket for ticket in self._in_progress.values() if ticket.until_s <= now_s]
        for ticket in late:
            self._failed(ticket, "the time limit was exceeded", now_s)
        return [ticket.key for ticket in reversed(late) if self._count_try(ticket, now_s)]

    def forget(self, key: Key) -> None:
        """Remove a group, wherever it is."""
        self._tries.pop(key, None)
        if (ticket := self._in_progress.get(key)) is not None:
            self._end(ticket)
        else:
            self._waiting.pop(key, None)

    def _worker(self, worker: str) -> _Worker:
        if (existing := self._workers.get(worker)) is None:
            idle = [name for name, one in self._workers.items() if not one.has]
            for name in idle[: max(0, len(self._workers) + 1 - MAX_WORKERS)]:
                del self._workers[name]
            existing = self._workers[worker] = _Worker()
        return existing

    def _current(self, key: Key, number: int, worker: str) -> Ticket | None:
        ticket = self._in_progress.get(key)
        return None if ticket is None or ticket.number != number or ticket.worker != worker else ticket

    def _probe(self, worker: str, now_s: float) -> list[Key]:
        """Return the group for the next probe of a held worker, if one waits."""
        one = self._workers[worker]
        fresh = next((key for key in self._waiting if not self._has_failed(worker, key)), None)
        failed = [key for key in self._waiting if self._has_failed(worker, key) and self._may_have(worker, key, now_s)]
        again = min(failed, key=lambda key: (-self._tries[key].count, self._tries[key].not_before_s), default=None)
        one.probed_fresh = fresh is not None and not (one.probed_fresh and again is not None)
        chosen = fresh if one.probed_fresh else again
        return [] if chosen is None else [chosen]

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
        """End the ticket of a worker that failed its group, and hold the worker after too many failures in a row."""
        self._end(ticket)
        one = self._worker(ticket.worker)
        one.since_s = one.since_s if one.failures else now_s
        repeated = self._has_failed(ticket.worker, ticket.key)
        one.failures += not repeated
        one.why = why
        if one.failures >= HOLD_AFTER and ticket.number >= one.held_from:
            one.holds += not (repeated and one.holds)
            one.held_until_s = now_s + min(MIN_HOLD_S * 2.0 ** (one.holds - 1), MAX_HOLD_S)
            one.held_from = self._next

    def _count_try(self, ticket: Ticket, failed_s: float | None = None) -> bool:
        """Count a failed try; requeue the group, or return True if it is given up.

        ``failed_s``: when its worker failed it; None: the worker was lost, which is no evidence against the group.
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
        del self._in_progress[ticket.key]
        self._workers[ticket.worker].has -= 1
