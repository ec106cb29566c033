"""A ranker with perfect knowledge of what can be known, as the upper limit of ranking."""

from collections.abc import Callable, Sequence

from staleflow.protocols.consistency.ids import GroupId
from staleflow.servers.scheduler.lengths.expected import Lengths


class KnownLengths(Lengths):
    """Expects the lengths that ``expected`` returns, whatever is observed."""

    def __init__(self, expected: Callable[[int], float]) -> None:
        super().__init__("none")
        self._of = expected

    def expected_of(self, groups: Sequence[GroupId]) -> list[float]:
        return [self._of(group) for group in groups]
