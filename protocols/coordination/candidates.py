"""Instances that the next groups could go to."""

from collections.abc import Sequence

from staleflow.protocols.consistency.ids import Version
from staleflow.protocols.coordination.view import Instance, Snapshot, Start


def candidates(snapshot: Snapshot) -> list[Instance]:
    """Instances that are not on hold, with a place free and room at the version that they would start with: the loaded
    one, or the newest once it is loaded."""
    room, newest = snapshot.room, snapshot.version
    return [
        i
        for i in snapshot.instances
        if i.held < i.capacity
        and not i.on_hold
        and (i.pulling and room.get(newest) if i.behind and not i.stuck else i.usable and room.get(i.version))
    ]


def loads(instance: Instance) -> bool:
    """It starts nothing before it has the newest weights. One that cannot get them goes on with those it has."""
    return instance.behind and not instance.stuck


def starts_with(instance: Instance, snapshot: Snapshot) -> Version:
    """The version of the groups that a candidate would start."""
    return snapshot.version if loads(instance) else instance.version


def dealt(snapshot: Snapshot, instances: Sequence[Instance], given: Sequence[int]) -> list[Start]:
    """The next groups in order, the first instance's share first. Shares of those that load wait for them."""
    orders: list[Start] = []
    first = 0
    for instance, count in zip(instances, given, strict=True):
        if count and not loads(instance):
            groups = tuple(item.group for item in snapshot.next[first : first + count])
            orders.append(Start(worker=instance.worker, version=instance.version, groups=groups))
            first += count
    return orders
