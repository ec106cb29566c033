"""Affinity of prompts to instances: the instance that last sampled each prompt. Kept in memory only."""

from collections import OrderedDict

from staleflow.protocols.consistency.ids import WorkerId

MAX_PROMPTS = 65_536
"""Maximum number of stored prompts; the least recently leased ones are discarded."""


class Affinity:
    """The last instance of each prompt, by row of the prompt source, so that it holds across epochs."""

    def __init__(self) -> None:
        self._of: OrderedDict[int, WorkerId] = OrderedDict()

    def of(self, row: int) -> WorkerId | None:
        return self._of.get(row)

    def record(self, row: int, worker: WorkerId) -> None:
        """Record that the prompt was leased to ``worker``."""
        self._of[row] = worker
        self._of.move_to_end(row)
        if len(self._of) > MAX_PROMPTS:
            self._of.popitem(last=False)
