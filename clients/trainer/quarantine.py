# pyright: basic, reportMissingImports=false
"""Find the groups whose data makes a step raise, and agree on them with the other ranks.

A rank must not leave a step alone, because the others would wait for it in a collective. An error of the algorithm
(advantages and loss, often user code) is kept until all ranks have finished their passes; then all of them raise.
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

RowIds = NDArray[np.int64]


class GroupQuarantine:
    """Groups of one step that cannot be trained."""

    def __init__(self, ranks: OneRank | ManyRanks) -> None:
        self._ranks = ranks
        self._reasons: dict[int, str] = {}
        self._config_error: ConfigError | None = None
        """The first error that names a configuration key."""

    def clear(self) -> None:
        """Start or restart a step."""
        self._reasons.clear()
        self._config_error = None

    def record(self, batch: TrainBatch, which: RowIds, error: Exception, attempt: Callable[[RowIds], object]) -> None:
        """Record the groups of some rows for which ``attempt`` alone raises.

        Raise ``error`` again if no group is responsible: none raises alone, or the device or its memory is at fault.
        """
        if out_of_memory(error) or isinstance(error, torch.AcceleratorError):
            raise error
        ids = batch.group_ids[which]
        failed = [int(group) for group in np.unique(ids) if not _passes(attempt, which[ids == group])]
        if not failed:
            raise error
        why = f"{type(error).__name__}: {error}"
        log.error("step %d: groups %s raise %s", batch.step, failed, why, exc_info=error)
        self._reasons |= dict.fromkeys(failed, why)
        if isinstance(error, ConfigError):
            self._config_error = self._config_error or error

    def raise_if_any(self, batch: TrainBatch) -> None:
        """Raise ``Untrainable`` on every rank if any rank recorded a group; ``batch``: this rank's groups.

        Every rank must call it equally often.
        """
        failed_anywhere = self._ranks.gather(np.array(sorted(self._reasons), np.int64))
        if not failed_anywhere.size:
            return
        every = np.unique(self._ranks.gather(np.unique(batch.group_ids)))
        failed_anywhere = np.unique(failed_anywhere)  # two ranks with trajectories of one group may both record it
        if self._config_error is not None and len(every) == len(failed_anywhere):
            raise self._config_error
        elsewhere = "see the log of another rank for the reason"
        why = next(iter(self._reasons.values()), elsewhere)
        groups = [GroupId(int(group)) for group in failed_anywhere]
        raise Untrainable(groups, why, every=1 < len(every) == len(groups))


def _passes(attempt: Callable[[RowIds], object], rows: RowIds) -> bool:
    try:
        with torch.no_grad():
            attempt(rows)
    except Exception as error:
        if out_of_memory(error):
            raise
        return False
    return True
