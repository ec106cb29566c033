"""The surviving history of a run, for a stage whose state belongs to it."""

from dataclasses import dataclass

import numpy as np

from staleflow.protocols.consistency.ids import Lineage, Version
from staleflow.protocols.consistency.ledger import Lineages
from staleflow.protocols.wire.messages import SchedulerStatus
from staleflow.protocols.wire.trajectory import GroupPayload

Position = tuple[Lineage, Version]
"""A version and the lineage that published it. In the surviving history, later versions compare greater."""

START: Position = (Lineage(0), Version(0))


@dataclass(frozen=True, slots=True)
class RunHistory:
    """The surviving versions of a run, and those that a trainer can resume from."""

    forks: tuple[tuple[int, int], ...] = ((0, 0),)
    """(lineage, its first own version), both ascending."""
    checkpoints: tuple[int, ...] = (0,)
    """Versions, ascending."""

    @classmethod
    def of(cls, status: SchedulerStatus) -> "RunHistory":
        return cls(forks=status.forks, checkpoints=status.checkpoints)

    @property
    def lineage(self) -> Lineage:
        return Lineage(self.forks[-1][0])

    def survives(self, position: Position) -> bool:
        """Return True if no rollback abandoned this version."""
        return Lineages(self.forks).survives(*position)

    def keeps(self, payload: GroupPayload) -> bool:
        """Return True if no rollback abandoned a version that wrote tokens of the group."""
        return all(map(self.survives, _positions(payload)))


def newest(payload: GroupPayload) -> Position:
    """Return the newest version that wrote tokens of the group; the start of the run for a group without tokens."""
    return max(_positions(payload), default=START)


def _positions(payload: GroupPayload) -> list[Position]:
    rows: list[list[int]] = np.unique(payload.segments[:, 1:3], axis=0).tolist()
    return [(Lineage(lineage), Version(version)) for lineage, version in rows]
