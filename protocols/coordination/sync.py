"""When an instance loads newer weights."""

from itertools import islice

from staleflow.protocols.coordination.view import Load, Snapshot

MOST_AT_ONCE = 16
"""Orders of one cycle. A thousand instances are told within a fifth of a second, and nobody else waits for them all."""


def greedy(snapshot: Snapshot) -> list[Load]:
    """Every instance that is behind loads the newest weights at once, unless it is told so already."""
    if snapshot.version < 0:
        return []
    behind = (i for i in snapshot.instances if i.behind and not i.pulling)
    return [
        Load(worker=i.worker, lineage=snapshot.lineage, version=snapshot.version) for i in islice(behind, MOST_AT_ONCE)
    ]
