"""Divide the trajectories of a batch among the ranks that train them. NumPy only.

A rank fetches whole groups, because advantages need whole groups. Forward and backward passes do not: if some ranks
have more tokens than others, trajectories move between them.
"""

import heapq

import numpy as np
from numpy.typing import NDArray

MIN_GAIN = 1.05
"""Minimum ratio of the fullest rank's tokens before and after a change; a smaller gain is not worth its cost."""
GROUPED = 1.02
"""Maximum ratio of the fullest rank's tokens to the mean for which trajectories of a group move together."""

Ints = NDArray[np.int64]


def balanced(tokens: Ints, groups: Ints, ranks: Ints, world: int) -> Ints:
    """Return the rank that trains each trajectory; all [N], in the same order on every rank.

    ``ranks``: the rank that fetched it. A rank gives away only its excess over the mean, and trajectories of a group
    stay together if the balance allows it, as passes may share the group's prompt. All are assigned afresh only where
    that gains much more. No rank gets more than the mean and one trajectory. The result depends only on the arguments;
    it is ``ranks`` if moving gains too little.
    """
    kept = _kept(tokens, groups, ranks, world)
    target = _moved(tokens, groups, ranks, kept, world, together=True)
    if fullest(tokens, target, world) > GROUPED:
        apart = _moved(tokens, groups, ranks, kept, world, together=False)
        target = min(target, apart, key=lambda each: fullest(tokens, each, world))
        afresh = _moved(tokens, groups, ranks, np.zeros_like(kept), world, together=False)
        target = _better(tokens, target, afresh, world)
    return _better(tokens, ranks, target, world)


def _better(tokens: Ints, ranks: Ints, other: Ints, world: int) -> Ints:
    """Return ``other`` if it gains at least ``MIN_GAIN``, or else ``ranks``."""
    return other if fullest(tokens, ranks, world) > MIN_GAIN * fullest(tokens, other, world) else ranks


def fullest(tokens: Ints, ranks: Ints, world: int) -> float:
    """Return the tokens of the fullest rank over the mean; 0 without any."""
    return float(_loads(tokens, ranks, world).max() * world / max(1, tokens.sum()))


def _kept(tokens: Ints, groups: Ints, ranks: Ints, world: int) -> NDArray[np.bool_]:
    """Return which trajectories stay: on each rank, group after group, those that fit within the mean."""
    kept, mean = np.zeros(len(tokens), np.bool_), tokens.sum() / world
    for rank in range(world):
        load = 0
        for rows in _by_group(tokens, groups, np.flatnonzero(ranks == rank)):
            for row in rows:
                if not load or load + tokens[row] <= mean:
                    kept[row] = True
                    load += int(tokens[row])
    return kept


def _moved(tokens: Ints, groups: Ints, ranks: Ints, kept: NDArray[np.bool_], world: int, *, together: bool) -> Ints:
    """Return ``ranks`` with new ranks for all trajectories that are not kept.

    ``together``: the emptiest rank takes from one group as many as fit within the mean, then the next rank. The rest,
    or everything, goes longest first to the emptiest rank.
    """
    target, mean = ranks.copy(), tokens.sum() / world
    loads = [(int(load), rank) for rank, load in enumerate(_loads(tokens[kept], ranks[kept], world))]
    heapq.heapify(loads)
    rest = np.flatnonzero(~kept).tolist()
    if together:
        left: list[int] = []
        for rows in _by_group(tokens, groups, np.array(rest, np.int64)):
            while rows:
                before, rank = loads[0]
                load, others = before, list[int]()
                for row in rows:
                    if load + tokens[row] <= mean:
                        target[row] = rank
                        load += int(tokens[row])
                    else:
                        others.append(row)
                if load == before:
                    left += others
                    break
                heapq.heapreplace(loads, (load, rank))
                rows = others
        rest = left
    for row in sorted(rest, key=lambda row: (-tokens[row], row)):
        load, rank = loads[0]
        target[row] = rank
        heapq.heapreplace(loads, (load + int(tokens[row]), rank))
    return target


def _by_group(tokens: Ints, groups: Ints, rows: Ints) -> list[list[int]]:
    """Return the rows of each group, the group with the most tokens first, in each the longest row first."""
    of_group: dict[int, list[int]] = {}
    for row in sorted(rows.tolist(), key=lambda row: (-tokens[row], row)):
        of_group.setdefault(int(groups[row]), []).append(row)
    return sorted(of_group.values(), key=lambda each: (-sum(tokens[each]), each[0]))


def _loads(tokens: Ints, ranks: Ints, world: int) -> Ints:
    return np.bincount(ranks, tokens, world).astype(np.int64)
