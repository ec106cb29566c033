"""Synchronization: the time at which an instance loads newer weights.

An instance that is behind starts no new groups, so its work decreases. In StaleFlow (2601.12784, synchronization
strategy) an instance pulls at a natural low of its own work, when routing anything to it under its old version is no
longer useful, rather than at a moment fixed for all instances.
"""

from collections.abc import Iterator
from itertools import islice
from typing import Literal, assert_never

from staleflow.protocols.coordination.view import Instance, Load, Snapshot

Sync = Literal["greedy", "threshold", "idle"]

MAX_AT_ONCE = 16
"""Maximum number of loads in one cycle. A thousand instances get their orders within a fifth of a second, and other
work does not wait for all of them."""


def load(snapshot: Snapshot, sync: Sync, threshold: int) -> list[Load]:
    """Return the loads of this cycle. Instances that already have the order are left out."""
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
    """Select every instance that is behind. Its running samples continue with the new weights, or end first."""
    return (i for i in snapshot.instances if i.behind and not i.pulling)


def below(snapshot: Snapshot, threshold: int) -> Iterator[Instance]:
    """Select every instance that is behind and has at most ``threshold`` samples left to decode.

    Samples ordered a moment ago that its reports do not include yet count. An instance whose version no longer survives
    is selected at once. So is one that failed to load: it continues with new groups and might never have so few left.
    """
    started = snapshot.group_size
    return (
        i
        for i in greedy(snapshot)
        if not i.usable or i.stuck or i.running + i.waiting + min(i.ordered, i.held) * started <= threshold
    )
