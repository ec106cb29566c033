"""Which instance gets the next groups. Each strategy takes a snapshot and returns whole orders, one an instance.

Room is shared: a group started at any version takes room from every version, so one count of started groups is held
against the room of each. That may start one group too few in a cycle, never one too many.
"""

from collections.abc import Callable
from heapq import heapify, heappop, heapreplace
from typing import Literal

from staleflow.protocols.consistency.ids import WorkerId
from staleflow.protocols.coordination.view import Instance, Snapshot, Start

Routing = Literal["least_loaded", "round_robin"]


def candidates(snapshot: Snapshot) -> list[Instance]:
    """Instances that could start a group now. One that is behind waits for the newest weights, unless it is stuck."""
    room = snapshot.room
    return [
        i
        for i in snapshot.instances
        if i.held < i.capacity and i.usable and (not i.behind or i.stuck) and room.get(i.version)
    ]


def least_loaded(snapshot: Snapshot) -> list[Start]:
    """Each group to the instance with the smallest share of its capacity in use; the longest attached among equals."""
    instances = candidates(snapshot)
    heap = [(i.held / i.capacity, position) for position, i in enumerate(instances)]
    heapify(heap)
    given = [0] * len(instances)
    started = 0
    while heap and started < snapshot.prompts:
        position = heap[0][1]
        instance = instances[position]
        if started >= snapshot.room[instance.version]:
            heappop(heap)
            continue
        given[position] += 1
        started += 1
        held = instance.held + given[position]
        if held < instance.capacity:
            heapreplace(heap, (held / instance.capacity, position))
        else:
            heappop(heap)
    return _orders(instances, given)


def round_robin(snapshot: Snapshot) -> list[Start]:
    """One group each in turn, going on after the instance that was served last."""
    instances = _after(candidates(snapshot), snapshot)
    given = [0] * len(instances)
    started = 0
    open_positions = list(range(len(instances)))
    while open_positions:
        still_open: list[int] = []
        for position in open_positions:
            instance = instances[position]
            if started >= snapshot.prompts or started >= snapshot.room[instance.version]:
                continue
            given[position] += 1
            started += 1
            if given[position] < instance.free:
                still_open.append(position)
        open_positions = still_open
    return _orders(instances, given)


def _after(instances: list[Instance], snapshot: Snapshot) -> list[Instance]:
    """``instances`` rotated to begin behind the one served last; order of attachment decides, also if it is full."""
    order: dict[WorkerId, int] = {i.worker: position for position, i in enumerate(snapshot.instances)}
    if snapshot.last_served is None or snapshot.last_served not in order:
        return instances
    turn = order[snapshot.last_served]
    later = [i for i in instances if order[i.worker] > turn]
    return later + [i for i in instances if order[i.worker] <= turn]


def _orders(instances: list[Instance], given: list[int]) -> list[Start]:
    return [
        Start(worker=instance.worker, version=instance.version, num_groups=count)
        for instance, count in zip(instances, given, strict=True)
        if count
    ]


ROUTINGS: dict[Routing, Callable[[Snapshot], list[Start]]] = {
    "least_loaded": least_loaded,
    "round_robin": round_robin,
}
