# pyright: basic, reportMissingImports=false
"""Find the groups whose data makes a step raise, and agree on them with the other ranks.

A rank must not leave a step alone: the others would wait for it in a collective. An error of the algorithm (advantages
and loss, often the user's code) is kept until all ranks are through their passes; then all of them raise together.
"""

import logging
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from staleflow.clients.out_of_memory import out_of_memory
from staleflow.clients.trainer.backends.base import Untrainable
from staleflow.clients.trainer.backends.collectives import ManyRanks, OneRank
from staleflow.clients.trainer.data.batch import TrainBatch
from staleflow.configs.errors import ConfigError
from staleflow.protocols.consistency.ids import GroupId

log = logging.getLogger(__name__)

Rows = NDArray[np.int64]


class Blame:
    """Groups of one step that cannot be trained."""

    def __init__(self, ranks: OneRank | ManyRanks) -> None:
        self._ranks = ranks
        self._found: dict[int, str] = {}
        self._refused: ConfigError | None = None
        """The first error that names a key of the configuration."""

    def clear(self) -> None:
        """A step begins, or begins again."""
        self._found.clear()
        self._refused = None

    def find(self, batch: TrainBatch, which: Rows, error: Exception, attempt: Callable[[Rows], object]) -> None:
        """Note the groups of some rows for which ``attempt`` alone raises. ``error`` is raised again where it is no
        group's: none raises alone, or the device or its memory is at fault."""
        if out_of_memory(error) or isinstance(error, torch.AcceleratorError):
            raise error
        ids = batch.group_ids[which]
        failed = [int(group) for group in np.unique(ids) if not _passes(attempt, which[ids == group])]
        if not failed:
            raise error
        why = f"{type(error).__name__}: {error}"
        log.error("step %d: groups %s raise %s", batch.step, failed, why, exc_info=error)
        self._found |= dict.fromkeys(failed, why)
        if isinstance(error, ConfigError):
            self._refused = self._refused or error

    def settle(self, batch: TrainBatch) -> None:
        """Raise ``Untrainable`` on every rank if any has found a group; ``batch``: this rank's rows. Every rank calls
        it equally often."""
        found = self._ranks.gather(np.array(sorted(self._found), np.int64))
        if not found.size:
            return
        every = self._ranks.gather(np.unique(batch.group_ids))
        if self._refused is not None and len(every) == len(found):
            raise self._refused
        elsewhere = "the log of another rank has the reason"
        why = next(iter(self._found.values()), elsewhere)
        groups = [GroupId(int(group)) for group in np.unique(found)]
        raise Untrainable(groups, why, every=1 < len(every) == len(groups))


def _passes(attempt: Callable[[Rows], object], rows: Rows) -> bool:
    try:
        with torch.no_grad():
            attempt(rows)
    except Exception as error:
        if out_of_memory(error):
            raise
        return False
    return True
