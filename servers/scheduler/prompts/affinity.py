"""Which instance had a prompt last. In memory only, and of the prompts that were dealt last."""

from collections import OrderedDict

from staleflow.protocols.consistency.ids import WorkerId

MOST = 65_536
"""Prompts that are remembered."""


class Homes:
    """By row of the prompt source, so that a prompt's next epoch finds it too."""

    def __init__(self) -> None:
        self._of: OrderedDict[int, WorkerId] = OrderedDict()

    def of(self, row: int) -> WorkerId | None:
        return self._of.get(row)

    def given(self, row: int, worker: WorkerId) -> None:
        """The prompt is there now."""
        self._of[row] = worker
        self._of.move_to_end(row)
        if len(self._of) > MOST:
            self._of.popitem(last=False)
