"""Which groups of a batch each rank trains: whole groups, about equally many tokens. Pure.

Longest group first, each to the rank with the fewest tokens so far. That is at most a third above the best partition
(Graham 1969, "Bounds on multiprocessing timing anomalies"), and far closer for the many groups of a batch.
"""

import heapq
from collections.abc import Sequence


def shares(tokens: Sequence[int], world: int) -> list[list[int]]:
    """The places of each rank's groups, ascending; no rank is without one while there are as many groups as ranks.

    Depends on ``tokens`` and ``world`` only, so that every rank works out the same.
    """
    loads = [(0, 0, rank) for rank in range(world)]
    mine: list[list[int]] = [[] for _ in range(world)]
    for place in sorted(range(len(tokens)), key=lambda place: (-tokens[place], place)):
        load, count, rank = heapq.heappop(loads)
        mine[rank].append(place)
        heapq.heappush(loads, (load + tokens[place], count + 1, rank))
    return [sorted(places) for places in mine]
