"""Groups on their way from one instance to another.

An order is kept until its lease ends one way or the other: moved, pushed, released, or not given up within
``PATIENCE_MS``. In memory only: whoever yields without an order that is known goes on as before.
"""

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass

from staleflow.protocols.consistency.ids import GroupId, LeaseId, WorkerId
from staleflow.protocols.coordination.view import Move

PATIENCE_MS = 10_000
"""A source that has not yielded by then was too busy to; the group may be ordered to move again."""


@dataclass(frozen=True, slots=True)
class Moving:
    """One order under way."""

    order: Move
    since_ms: int


class Moves:
    """Orders by lease, and where what was written of a moved group is found."""

    def __init__(self) -> None:
        self.pending: dict[LeaseId, Moving] = {}
        self._brought: dict[GroupId, Move] = {}
        """What the current lease of a group goes on from."""
        self._brought_sha: dict[GroupId, str] = {}
        """Of what is found there."""
        self._left: tuple[Move, str] | None = None

    def order(self, order: Move, now_ms: int) -> None:
        """A group has been told to move."""
        self.pending[order.lease] = Moving(order, now_ms)

    def coming(self, worker: WorkerId) -> int:
        """Groups on their way to an instance."""
        return sum(moving.order.to == worker for moving in self.pending.values())

    def end(self, lease: LeaseId) -> Move | None:
        """The lease is over, or its order is; the order."""
        moving = self.pending.pop(lease, None)
        return None if moving is None else moving.order

    def expire(self, now_ms: int) -> list[Move]:
        """Give up what takes too long."""
        return self._give_up(moving for moving in self.pending.values() if moving.since_ms + PATIENCE_MS <= now_ms)

    def lose(self, worker: WorkerId) -> list[Move]:
        """An instance is gone: what was to come from it or to go there stays where it is, if anywhere."""
        return self._give_up(m for m in self.pending.values() if worker in (m.order.worker, m.order.to))

    def _give_up(self, found: Iterable[Moving]) -> list[Move]:
        orders = [moving.order for moving in found]
        for order in orders:
            del self.pending[order.lease]
        return orders

    # --- what was written --------------------------------------------------------------------------------------

    @contextmanager
    def leaving(self, order: Move, sha: str) -> Generator[None]:
        """Meanwhile the group is leased anew: the new lease continues from what this one left (``sha``)."""
        self._left = order, sha
        try:
            yield
        finally:
            self._left = None

    def is_leaving(self, lease: LeaseId) -> bool:
        """Whether the end of this lease is half of a move."""
        return self._left is not None and self._left[0].lease == lease

    def arrives(self, group: GroupId) -> None:
        """A lease of the group was granted; only the first one after ``leaving`` goes on from anything."""
        if self._left is not None and self._left[0].group == group:
            (self._brought[group], self._brought_sha[group]), self._left = self._left, None

    def partial(self, group: GroupId) -> LeaseId:
        """The lease under which the shard has what the current one goes on from; 0: it began the group."""
        brought = self._brought.get(group)
        return LeaseId(0) if brought is None else brought.lease

    def partial_sha(self, group: GroupId) -> str:
        """The sha256 of what the shard has under ``partial``; empty: nothing."""
        return self._brought_sha.get(group, "")

    def written(self, group: GroupId) -> float:
        """Expected tokens of one sample that the current lease goes on from; 0.0: it began the group."""
        brought = self._brought.get(group)
        return 0.0 if brought is None else brought.written

    def forget(self, group: GroupId) -> None:
        """The current lease of a group is over."""
        self._brought.pop(group, None)
        self._brought_sha.pop(group, None)

    def clear(self) -> None:
        """A restart, or a rollback: nobody moves, and what was written may be of abandoned versions."""
        self.pending.clear()
        self._brought.clear()
        self._brought_sha.clear()
