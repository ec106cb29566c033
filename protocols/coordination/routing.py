"""Which instance gets the next groups. Each strategy takes a snapshot and returns whole orders, one an instance.

- What starts is always the first n of ``next``; only who gets which of them is up to the strategy.
- Room is shared: a group started at any version takes room from every version, so one count of started groups is held
  against the room of each. That may start one group too few in a cycle, never one too many.
- An instance that is loading the newest weights has a share like the others, and gets it when they are loaded.
  Otherwise the first one to be ready would get everything that a new version lets in.
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
    """Who starts which groups now."""
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
    """Each group to the instance with the smallest share of its capacity in use; the longest attached among equals.

    What StaleFlow's released router does unless told otherwise.
    """
    instances = candidates(snapshot)
    return dealt(snapshot, instances, _even(snapshot, instances))


def _even(snapshot: Snapshot, instances: list[Instance]) -> list[int]:
    """How many groups each instance gets, so that all have the same share of their capacity in use."""
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
    """One group each in turn, going on after the instance that was served last."""
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
    """``instances`` rotated to begin behind the one served last; order of attachment decides, also if it is full."""
    order: dict[WorkerId, int] = {i.worker: position for position, i in enumerate(snapshot.instances)}
    if snapshot.last_served is None or snapshot.last_served not in order:
        return instances
    turn = order[snapshot.last_served]
    later = [i for i in instances if order[i.worker] > turn]
    return later + [i for i in instances if order[i.worker] <= turn]


def sticky(snapshot: Snapshot) -> list[Start]:
    """As many groups as ``least_loaded`` starts, each where its prompt was before if there is a place; the others to
    the least loaded. For prefix caches: the prompt need not be read again there."""
    instances = candidates(snapshot)
    shares = [(i, n) for i, n in zip(instances, _even(snapshot, instances), strict=True) if not loads(i)]
    same = len({i.version for i, _ in shares}) == 1
    places = [i.free if same else n for i, n in shares]  # what one version has room for another may not
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
    """Give each group to the least loaded instance that has a place."""
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
