"""Split a batch into mini-batches of whole groups, one for each optimizer update of a step. NumPy only."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchGroups:
    """The groups of a batch on all ranks, in the same order on every rank. All [G]."""

    ids: NDArray[np.int64]
    ranks: NDArray[np.int64]
    """The rank that has the group, or the first of them."""
    tokens: NDArray[np.int64]
    """Trained tokens."""


def mini_batches(groups: BatchGroups, count: int, *, seed: int, step: int, epoch: int) -> list[NDArray[np.int64]]:
    """Return the positions in ``groups`` of each of the ``count`` mini-batches of one epoch, in training order.

    Each group is in exactly one. The shuffled groups of rank 0, then those of rank 1, and so on are dealt out one by
    one, so that the mini-batches differ by at most one group, also in the number of groups on each rank. Depends only
    on the arguments, so that every rank, and a step that is repeated, gets the same.
    """
    order = np.random.default_rng((seed, step, epoch)).permutation(len(groups.ids))
    order = order[np.argsort(groups.ranks[order], kind="stable")]
    return [order[place::count] for place in range(count)]
