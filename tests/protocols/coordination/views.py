"""Builders of snapshots, and the conditions that every order must satisfy."""

from collections.abc import Iterable
from typing import Any

from hypothesis import strategies as st

from staleflow.protocols.consistency.ids import GroupId, Lineage, Version, WorkerId
from staleflow.protocols.coordination.view import Cost, Instance, Load, Next, Order, Snapshot, Start

FLAT = Cost(k1=0.0, k2=0.01, k3=0.001, k4=0.0)
"""100 steps a second up to ten samples, then ever slower: 1,000 tokens a second at most."""


def instance(name: str, **known: Any) -> Instance:
    """Instance that holds nothing and has the newest weights of ``snapshot``; ``known`` overrides its fields."""
    fixed: dict[str, Any] = {
        "lineage": Lineage(0), "version": Version(3), "usable": True, "behind": False, "pulling": False,
        "held": 0, "capacity": 4,
    }  # fmt: skip
    return Instance(worker=WorkerId(name), **fixed | known)


def behind(name: str, **known: Any) -> Instance:
    """Instance with version 2, due to load version 3."""
    return instance(name, **{"version": Version(2), "behind": True} | known)


def snapshot(
    *instances: Instance, room: int = 100, older: int | None = None, groups: int = 100, **known: Any
) -> Snapshot:
    """Version 3 is the newest; older versions have the same room, or ``older``; groups 0, 1, ... are next."""
    fixed: dict[str, Any] = {
        "room": {Version(version): room if older is None or version == 3 else older for version in range(4)},
        "next": tuple(Next(group=GroupId(group)) for group in range(groups)),
        "group_size": 1, "batch_size": 4, "max_staleness": 3,
    }  # fmt: skip
    return Snapshot(lineage=Lineage(0), version=Version(3), instances=instances, **fixed | known)


def lengths(*expected: float) -> tuple[Next, ...]:
    """Return groups 0, 1, ... with these expected lengths."""
    return tuple(Next(group=GroupId(group), length=length) for group, length in enumerate(expected))


def start(name: str, *groups: int, version: int = 3) -> Start:
    return Start(worker=WorkerId(name), version=Version(version), groups=tuple(GroupId(group) for group in groups))


def load(name: str) -> Load:
    return Load(worker=WorkerId(name), lineage=Lineage(0), version=Version(3))


COSTS = st.builds(
    Cost,
    k1=st.sampled_from([0.0, 1e-7, 1e-6]),
    k2=st.sampled_from([0.0, 0.01, 0.02]),
    k3=st.sampled_from([0.0, 1e-4, 1e-3]),
    k4=st.sampled_from([0.0, 0.001]),
)


@st.composite
def instances_of(draw: st.DrawFn) -> Instance:
    """Draw any instance that a scheduler could know; version 3 is the newest."""
    version = draw(st.sampled_from([-1, 1, 2, 3, 3, 3]))
    held = draw(st.integers(0, 6))
    return Instance(
        worker=WorkerId(f"w{draw(st.integers(0, 30))}"),
        lineage=Lineage(0),
        version=Version(version),
        usable=draw(st.booleans()) and version >= 0,
        behind=version < 3,
        pulling=draw(st.booleans()) and version < 3,
        stuck=draw(st.booleans()) and version < 3,
        held=held,
        ordered=min(held, 1),
        capacity=draw(st.integers(1, 6)),
        running=draw(st.integers(0, 20)),
        waiting=draw(st.integers(0, 5)),
        slots=draw(st.sampled_from([0, 8, 16])),
        kv_tokens=draw(st.integers(0, 5_000)),
        kv_capacity=draw(st.sampled_from([0, 1_000, 10_000])),
        cost=draw(st.none() | COSTS),
    )


@st.composite
def snapshots(draw: st.DrawFn) -> Snapshot:
    """Draw any snapshot that a scheduler could take: room never falls from a version to a newer one."""
    instances = draw(st.lists(instances_of(), max_size=8, unique_by=lambda i: i.worker))
    rooms = sorted(draw(st.lists(st.integers(0, 12), min_size=4, max_size=4)))
    homes = st.none() | st.sampled_from([WorkerId(f"w{n}") for n in range(31)])
    items = st.tuples(st.sampled_from([0.0, 10.0, 500.0]), homes)
    following = [
        Next(group=GroupId(group), length=length, home=home)
        for group, (length, home) in enumerate(draw(st.lists(items, max_size=12)))
    ]
    return Snapshot(
        lineage=Lineage(0),
        version=Version(3),
        instances=tuple(instances),
        room={Version(version): room for version, room in enumerate(rooms)},
        next=tuple(following),
        last_served=draw(homes),
        group_size=draw(st.integers(1, 4)),
        batch_size=4,
        max_staleness=2,
        leased=draw(st.integers(0, 12)),
        sealed=draw(st.sampled_from([0, 4])),
        lead=draw(st.sampled_from([0.0, 0.5, 3.0])),
    )


def check_orders(seen: Snapshot, orders: Iterable[Order]) -> None:
    """Check that the orders are valid for the snapshot.

    They name known instances only, give none more than it can hold or weights that it lacks, and start a prefix of the
    next groups, each once. No version gets more groups than it has room for.
    """
    known = {i.worker: i for i in seen.instances}
    started: list[GroupId] = []
    for order in orders:
        assert order.worker in known
        if isinstance(order, Start):
            i = known[order.worker]
            assert 0 < len(order.groups) <= i.free
            assert order.version == i.version
            assert i.usable
            assert not i.behind or i.stuck
            started += order.groups
    assert sorted(started) == [item.group for item in seen.next[: len(started)]]
    for version, room in seen.room.items():
        older = [order for order in orders if isinstance(order, Start) and order.version <= version]
        assert sum(len(order.groups) for order in older) <= room
    assert len(started) <= max(seen.room.values(), default=0)
