"""Which versions survived the rollbacks. A version is named by (lineage, number); the fork points say which names hold.

Each rollback to ``k`` starts a lineage whose first own version is ``k + 1``. Only forks that a later, deeper rollback
did not cut off are kept, so the list is as short as the surviving history is simple.
"""

from staleflow.protocols.consistency.ids import Lineage, Version


class Lineages:
    """The surviving history, newest lineage last."""

    __slots__ = ("current", "forks")

    def __init__(self) -> None:
        self.current = Lineage(0)
        self.forks: list[tuple[int, int]] = [(0, 0)]
        """(lineage, its first own version), both ascending."""

    def of(self, version: int) -> Lineage:
        """The lineage in which the surviving ``version`` was published."""
        for lineage, first in reversed(self.forks):
            if first <= version:
                return Lineage(lineage)
        return Lineage(0)

    def survives(self, lineage: int, version: int) -> bool:
        """True when (lineage, version) is part of the surviving history, whether it is published yet or not."""
        if not 0 <= lineage <= self.current:
            return False
        for fork, first in self.forks:
            if fork > lineage:
                return version < first
        return True

    def fork(self, version: Version) -> Lineage:
        """Go back to ``version``: what came after it is abandoned, what comes next is a new lineage."""
        self.current = Lineage(self.current + 1)
        while self.forks[-1][1] > version:
            self.forks.pop()
        self.forks.append((self.current, version + 1))
        return self.current
