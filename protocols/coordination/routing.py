"""Routing: the assignment of the next groups to instances. Each strategy returns whole orders, one an instance.

- The started groups are always the first n of ``next``. The strategy decides only their distribution.
- Room is shared: a group started at any version takes room from every version, so one count of started groups is
  compared with the room of each version. A cycle may therefore start one group too few, never one too many.
- An instance that is loading the newest weights has a share like the others, and gets it when they are loaded.
  Otherwise the first instance to be ready would get everything that a new version admits.
"""

from collections.abc import Sequence
from heapq import heapify, heappop, heapreplace
from typing import Literal, assert_never

from staleflow.protocols.consistency.ids import GroupId, WorkerId
from staleflow.protocols.coordination.candidates import candidates, dealt, loads, starts_with
from staleflow.protocols.coordination.cost import cost_model
from staleflow.protocols.coordination.view import Instance, Snapshot, Start

Routing = Literal["cost_model", "least_loaded", "round_robin", "sticky"]


def route(snapshot: Snapshot, routing: Routing, min_gain: float) -> list[Start]:
    """Return the starts of this cycle."""
    if not snapshot.next or not any(snapshot.room.values()):
        return []
    match routing:
        case "least_loaded":
            return least_loaded(snapshot)
        case "cost_model":
            return cost_model(snapshot, min_gain)
        case "round_robin":
            return round_robin(snapshot)
        case "sticky":
            return sticky(snapshot)
        case _:
            assert_never(routing)


def least_loaded(snapshot: Snapshot) -> list[Start]:
    """Assign each group to the instance with the smallest share of its capacity in use.

    Among equals the instance attached first wins. This is the default of StaleFlow's released router.
    """
    instances = candidates(snapshot)
    return dealt(snapshot, instances, _even(snapshot, instances))


def _even(snapshot: Snapshot, instances: list[Instance]) -> list[int]:
    """Return the number of groups for each instance that evens out the shares of their capacity in use."""
    heap = [(i.held / i.capacity, position) for position, i in enumerate(instances)]
    heapify(heap)
    given = [0] * len(instances)
    started = 0
    while heap and started < len(snapshot.next):
        position = heap[0][1]
        instance = instances[position]
        if started >= snapshot.room[starts_with(instance, snapshot)]:
            heappop(heap)
            continue
        given[position] += 1
        started += 1
        held = instance.held + given[position]
        if held < instance.capacity:
            heapreplace(heap, (held / instance.capacity, position))
        else:
            heappop(heap)
    return given


def round_robin(snapshot: Snapshot) -> list[Start]:
    """Assign one group to each instance in turn, starting after the instance that was served last."""
    instances = _after(candidates(snapshot), snapshot)
    given = [0] * len(instances)
    started = 0
    open_positions = list(range(len(instances)))
    while open_positions:
        still_open: list[int] = []
        for position in open_positions:
            instance = instances[position]
            if started >= len(snapshot.next) or started >= snapshot.room[starts_with(instance, snapshot)]:
                continue
            given[position] += 1
            started += 1
            if given[position] < instance.free:
                still_open.append(position)
        open_positions = still_open
    return dealt(snapshot, instances, given)


def _after(instances: list[Instance], snapshot: Snapshot) -> list[Instance]:
    """Return ``instances`` rotated to start after the one served last.

    The order is that of attachment, so that the position is right even if that instance is full now.
    """
    order: dict[WorkerId, int] = {i.worker: position for position, i in enumerate(snapshot.instances)}
    if snapshot.last_served is None or snapshot.last_served not in order:
        return instances
    turn = order[snapshot.last_served]
    later = [i for i in instances if order[i.worker] > turn]
    return later + [i for i in instances if order[i.worker] <= turn]


def sticky(snapshot: Snapshot) -> list[Start]:
    """Assign as many groups as ``least_loaded``, each to the instance that had its prompt before, if it has a place.

    The other groups go to the least loaded instances. Prefix caches benefit: the earlier instance need not prefill the
    prompt again.
    """
    instances = candidates(snapshot)
    shares = [(i, n) for i, n in zip(instances, _even(snapshot, instances), strict=True) if not loads(i)]
    same = len({i.version for i, _ in shares}) == 1
    # Versions differ in their room, so groups may shift between instances only if all have the same version.
    places = [i.free if same else n for i, n in shares]
    homes = {i.worker: position for position, (i, _) in enumerate(shares)}
    given: list[list[GroupId]] = [[] for _ in shares]
    others: list[GroupId] = []
    for item in snapshot.next[: sum(n for _, n in shares)]:
        position = None if item.home is None else homes.get(item.home)
        if position is not None and len(given[position]) < places[position]:
            given[position].append(item.group)
        else:
            others.append(item.group)
    _fill(others, given, places, [i for i, _ in shares])
    return [
        Start(worker=i.worker, version=i.version, groups=tuple(groups))
        for (i, _), groups in zip(shares, given, strict=True)
        if groups
    ]


def _fill(groups: Sequence[GroupId], given: list[list[GroupId]], places: list[int], instances: list[Instance]) -> None:
    """Assign each group to the least loaded instance that has a place."""
    heap = [
        ((i.held + len(given[position])) / i.capacity, position)
        for position, i in enumerate(instances)
        if len(given[position]) < places[position]
    ]
    heapify(heap)
    for group in groups:
        position = heap[0][1]
        given[position].append(group)
        if len(given[position]) < places[position]:
            instance = instances[position]
            heapreplace(heap, ((instance.held + len(given[position])) / instance.capacity, position))
        else:
            heappop(heap)
