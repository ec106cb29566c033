"""Filter lines of ``metrics.jsonl`` that a rollback has made obsolete. No IO."""

from collections.abc import Mapping
from typing import Any


class Lineages:
    """Tracks the lineages of lines in file order.

    The first line of a later lineage marks the rollback point: its own step, or, if it is an evaluation before the
    first step, the step after it.
    """

    def __init__(self) -> None:
        self._newest = 0

    def is_old(self, line: Mapping[str, Any]) -> bool:
        """Return whether ``line`` precedes a known rollback."""
        return _lineage(line) < self._newest

    def take_back(self, line: Mapping[str, Any], *by_step: dict[int, Any]) -> None:
        """Remove the steps after that of ``line`` from ``by_step`` if ``line`` is the first of a new lineage."""
        if _lineage(line) <= self._newest:
            return
        self._newest = _lineage(line)
        for values in by_step:
            for step in [step for step in values if step > int(line.get("step") or 0)]:
                del values[step]


def _lineage(line: Mapping[str, Any]) -> int:
    return int(line.get("lineage") or 0)
