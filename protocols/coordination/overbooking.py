"""Overbooking: the number of groups of an engine whose slots are not all in use.

The last sample of a group may take minutes longer than the others. By its own capacity, an engine with many such groups
would be full while most of its slots are free (docs/decisions/0049-dispatch-groups-and-fill-free-slots.md).
"""

import math

from staleflow.protocols.coordination.migration import FULL_KV

MAX_OVERBOOKING = 4
"""Maximum number of groups of an engine, as a multiple of its capacity."""


def overbooked(
    capacity: int,
    *,
    held: int,
    ordered: int,
    started: int,
    running: int,
    waiting: int,
    slots: int,
    kv_used: float,
) -> int:
    """Return the maximum number of groups of an engine: its own ``capacity``, or more while it has free slots.

    ``held``: groups that it works on. ``ordered``: groups that will start there and that its report does not include.
    ``started``: samples of each. ``running``, ``waiting``, ``slots`` (samples) and ``kv_used`` (0 to 1): its report.
    """
    if not 0 < running < slots or waiting or kv_used >= FULL_KV:
        return capacity
    more = max(0, math.ceil((slots - running - ordered * started) / started))
    return max(capacity, min(held + more, MAX_OVERBOOKING * capacity))
