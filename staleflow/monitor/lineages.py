"""Which lines of ``metrics.jsonl`` belong to the history that survived. Pure."""

from collections.abc import Mapping
from typing import Any


class Lineages:
    """Takes lines in their order. The first of a later lineage says where that one began: at its step, or, where it is
    an evaluation before the first step, after it."""

    def __init__(self) -> None:
        self._newest = 0

    def is_old(self, line: Mapping[str, Any]) -> bool:
        """Whether ``line`` is from before a rollback that is known."""
        return _lineage(line) < self._newest

    def take_back(self, line: Mapping[str, Any], *by_step: dict[int, Any]) -> None:
        """Removes what ``line`` is the first to say was taken back: the steps after its own."""
        if _lineage(line) <= self._newest:
            return
        self._newest = _lineage(line)
        for values in by_step:
            for step in [step for step in values if step > int(line.get("step") or 0)]:
                del values[step]


def _lineage(line: Mapping[str, Any]) -> int:
    return int(line.get("lineage") or 0)
