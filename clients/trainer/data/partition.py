"""Partition a batch's groups over the ranks: whole groups, about equal token counts. Pure.

The longest group goes first, each to the rank with the fewest tokens so far. The result is at most a third above the
optimum (Graham 1969, "Bounds on multiprocessing timing anomalies"), and far closer for the many groups of a batch.
(Graham 1969, "Bounds on multiprocessing timing anomalies"), and far closer for the many groups of a batch.
"""

import heapq
from collections.abc import Sequence


def shares(tokens: Sequence[int], world: int) -> list[list[int]]:
    """Return the positions of each rank's groups, ascending; no rank is empty if there are as many groups as ranks.

    The result depends only on ``tokens`` and ``world``, so that every rank computes the same.
    """
    loads = [(0, 0, rank) for rank in range(world)]
    mine: list[list[int]] = [[] for _ in range(world)]
    for place in sorted(range(len(tokens)), key=lambda place: (-tokens[place], place)):
        load, count, rank = heapq.heappop(loads)
        mine[rank].append(place)
        heapq.heappush(loads, (load + tokens[place], count + 1, rank))
    return [sorted(places) for places in mine]
