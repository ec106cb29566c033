"""The queue of one stage: which groups wait for it, who works on which, and whose answer still counts.

- A worker takes a group with a ticket. Only the newest ticket of a group can finish it.
- A ticket ends when its worker is gone or its time is over; the group is then first in the queue again, ``MAX_TRIES``
  times in all.
- A worker may take more while it has some, and do all of them one after another: a ticket lasts for those before it.

Pure: time comes in as ``now_s``.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain, islice

from staleflow.protocols.consistency.ids import GroupId
from staleflow.servers.trajectories.records import Key

MAX_TRIES = 3
"""Workers that may vanish with a group before it is given up."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """The right to finish one group."""

    number: int
    key: Key
    worker: str
    until_s: float


class StageQueue:
    """One stage. ``first_ticket`` must differ from that of an earlier process."""

    def __init__(self, first_ticket: int) -> None:
        self._next = first_ticket
        self._waiting: OrderedDict[Key, None] = OrderedDict()
        self._taken: dict[Key, Ticket] = {}
        self._has: Counter[str] = Counter()
        """Of the taken ones, each worker's."""
        self._lost: dict[Key, int] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def taken(self) -> int:
        """Groups that a worker has."""
        return len(self._taken)

    def first(self, most: int) -> list[GroupId]:
        """Groups that workers have, then those that wait, the longest waiting first; no more than so many."""
        return [key.group for key in islice(chain(self._taken, self._waiting), most)]

    def add(self, key: Key) -> None:
        """A group is ready for this stage."""
        self._waiting[key] = None

    def take(self, worker: str, most: int, *, now_s: float, seconds_each: float) -> list[Ticket]:
        """The longest waiting groups, at most ``most``. A worker may do them one after another, behind what it has."""
        tickets: list[Ticket] = []
        count = min(most, len(self._waiting))
        until_s = now_s + (self._has[worker] + count) * seconds_each
        for _ in range(count):
            key, _ = self._waiting.popitem(last=False)
            ticket = Ticket(self._next, key, worker, until_s)
            self._next += 1
            self._taken[ticket.key] = ticket
            tickets.append(ticket)
        if count:
            self._has[worker] += count
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
        ticket = self._taken.get(key)
        if ticket is None or ticket.number != number or ticket.worker != worker:
            return False
        self.forget(key)
        return True

    def lose(self, worker: str) -> list[Key]:
        """A worker is gone; return the groups that were tried too often and have left the queue."""
        return self._lose(lambda ticket: ticket.worker == worker)

    def expire(self, now_s: float) -> list[Key]:
        """Time passes; return the groups that were tried too often and have left the queue."""
        return self._lose(lambda ticket: ticket.until_s <= now_s)

    def forget(self, key: Key) -> None:
        """The group is no longer wanted, wherever it is."""
        self._lost.pop(key, None)
        if (ticket := self._taken.get(key)) is not None:
            self._end(ticket)
        else:
            self._waiting.pop(key, None)

    def _put_first(self, key: Key) -> None:
        self._waiting[key] = None
        self._waiting.move_to_end(key, last=False)

    def _end(self, ticket: Ticket) -> None:
        del self._taken[ticket.key]
        self._has[ticket.worker] -= 1
        if not self._has[ticket.worker]:
            del self._has[ticket.worker]

    def _lose(self, ends: Callable[[Ticket], bool]) -> list[Key]:
        given_up: list[Key] = []
        lost = [ticket for ticket in self._taken.values() if ends(ticket)]
        for ticket in reversed(lost):
            self._end(ticket)
            tries = self._lost[ticket.key] = self._lost.get(ticket.key, 0) + 1
            if tries < MAX_TRIES:
                self._put_first(ticket.key)
            else:
                del self._lost[ticket.key]
                given_up.append(ticket.key)
        return given_up
