"""Moves of groups from one instance to another.

A move is pending until its lease ends (moved, pushed or released), or until ``MOVE_TIMEOUT_MS`` have passed. Moves are
kept in memory only: an instance that yields a lease without a pending move is refused and continues the group.
"""

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass

from staleflow.protocols.consistency.ids import GroupId, LeaseId, WorkerId
from staleflow.protocols.coordination.view import Move

MOVE_TIMEOUT_MS = 10_000
"""Time that an instance has to yield a group; after that, the group may be ordered to move again."""


@dataclass(frozen=True, slots=True)
class PendingMove:
    """A pending move."""

    order: Move
    since_ms: int
    reserved: bool = False
    """Not ordered: the instance gave up the group unasked and waits for a place at the target."""


class Moves:
    """Pending moves by lease, and the location of the partial output of moved groups."""

    def __init__(self) -> None:
        self.pending: dict[LeaseId, PendingMove] = {}
        self._sources: dict[GroupId, Move] = {}
        """The move that started the current lease of a group: the lease continues its partial output."""
        self._source_shas: dict[GroupId, str] = {}
        """SHA-256 of that partial output."""
        self._leaving: tuple[Move, str] | None = None

    def order(self, order: Move, now_ms: int, *, reserved: bool = False) -> None:
        """Record a move whose yield command was queued, or one for which a place is ``reserved``."""
        self.pending[order.lease] = PendingMove(order, now_ms, reserved)

    def coming(self, worker: WorkerId) -> int:
        """Return the number of groups that are moving to an instance."""
        return sum(moving.order.to == worker for moving in self.pending.values())

    def end(self, lease: LeaseId) -> Move | None:
        """Discard and return the move of a lease; None if there is none."""
        moving = self.pending.pop(lease, None)
        return None if moving is None else moving.order

    def expire(self, now_ms: int) -> list[Move]:
        """Discard and return the moves that have timed out."""
        return self._give_up(moving for moving in self.pending.values() if moving.since_ms + MOVE_TIMEOUT_MS <= now_ms)

    def remove_instance(self, worker: WorkerId) -> list[Move]:
        """Discard and return the moves from and to an instance that is gone."""
        return self._give_up(m for m in self.pending.values() if worker in (m.order.worker, m.order.to))

    def _give_up(self, moves: Iterable[PendingMove]) -> list[Move]:
        orders = [moving.order for moving in moves]
        for order in orders:
            del self.pending[order.lease]
        return orders

    # --- partial output ----------------------------------------------------------------------------------------

    @contextmanager
    def leaving(self, order: Move, sha: str) -> Generator[None]:
        """Context in which the moved group is leased again: the new lease continues this one's partial output."""
        self._leaving = order, sha
        try:
            yield
        finally:
            self._leaving = None

    def is_leaving(self, lease: LeaseId) -> bool:
        """Return whether this lease ends because its group is moving."""
        return self._leaving is not None and self._leaving[0].lease == lease

    def lease_granted(self, group: GroupId) -> None:
        """Record that the group was leased again. Only the first lease within ``leaving`` continues partial output."""
        if self._leaving is not None and self._leaving[0].group == group:
            (self._sources[group], self._source_shas[group]), self._leaving = self._leaving, None

    def partial(self, group: GroupId) -> LeaseId:
        """Return the lease under which the shard stores the partial output to continue; 0 if there is none."""
        source = self._sources.get(group)
        return LeaseId(0) if source is None else source.lease

    def partial_sha(self, group: GroupId) -> str:
        """Return the SHA-256 of the output stored under ``partial``; empty if there is none."""
        return self._source_shas.get(group, "")

    def written(self, group: GroupId) -> float:
        """Return the expected tokens of one sample in the partial output; 0.0 if there is none."""
        source = self._sources.get(group)
        return 0.0 if source is None else source.written

    def forget(self, group: GroupId) -> None:
        """Discard the partial output of a group whose lease has ended."""
        self._sources.pop(group, None)
        self._source_shas.pop(group, None)

    def clear(self) -> None:
        """Discard everything after a failed commit or a rollback: partial output may be of abandoned versions."""
        self.pending.clear()
        self._sources.clear()
        self._source_shas.clear()
