"""When an instance loads newer weights. Whoever is behind starts no new groups, so it comes to have less to do.

StaleFlow (2601.12784, synchronization strategy): an instance pulls at a natural low of its own work, when it is no
longer useful to route anything to it under its old version, not at a moment fixed for all.
"""

from collections.abc import Iterator
from itertools import islice
from typing import Literal, assert_never

from staleflow.protocols.coordination.view import Instance, Load, Snapshot

Sync = Literal["greedy", "threshold", "idle"]

MAX_AT_ONCE = 16
"""Orders of one cycle. A thousand instances are told within a fifth of a second, and nobody else waits for them all."""


def load(snapshot: Snapshot, sync: Sync, threshold: int) -> list[Load]:
    """Who loads the newest weights now, unless it is told so already."""
    if snapshot.version < 0:
        return []
    match sync:
        case "greedy":
            chosen = greedy(snapshot)
        case "threshold":
            chosen = below(snapshot, threshold)
        case "idle":
            chosen = below(snapshot, 0)
        case _:
            assert_never(sync)
    return [
        Load(worker=i.worker, lineage=snapshot.lineage, version=snapshot.version) for i in islice(chosen, MAX_AT_ONCE)
    ]


def greedy(snapshot: Snapshot) -> Iterator[Instance]:
    """Every instance that is behind, at once: what runs goes on with the new weights, or is ended first."""
    return (i for i in snapshot.instances if i.behind and not i.pulling)


def below(snapshot: Snapshot, threshold: int) -> Iterator[Instance]:
    """Every instance that is behind and has no more than ``threshold`` samples left to write.

    What it was told to begin a moment ago and does not show yet counts; what its version no longer survives does not.
    One that could not load goes on with new groups and might never have so little left: it tries again at once.
    """
    started = snapshot.group_size
    return (
        i
        for i in greedy(snapshot)
        if not i.usable or i.stuck or i.running + i.waiting + min(i.ordered, i.held) * started <= threshold
    )
