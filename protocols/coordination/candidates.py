"""Selection of the instances that could start the next groups."""

from collections.abc import Sequence

from staleflow.protocols.consistency.ids import Version
from staleflow.protocols.coordination.view import Instance, Snapshot, Start


def candidates(snapshot: Snapshot) -> list[Instance]:
    """Return the instances that are not on hold, have a free place, and have room at their starting version.

    The starting version is the loaded one, or the newest one if the instance is about to load it.
    """
    room, newest = snapshot.room, snapshot.version
    return [
        i
        for i in snapshot.instances
        if i.held < i.capacity
        and not i.on_hold
        and (i.pulling and room.get(newest) if i.behind and not i.stuck else i.usable and room.get(i.version))
    ]


def loads(instance: Instance) -> bool:
    """Return True if the instance must load the newest weights before it starts groups.

    An instance that cannot load them continues with the weights it has.
    """
    return instance.behind and not instance.stuck


def starts_with(instance: Instance, snapshot: Snapshot) -> Version:
    """Return the version of the groups that a candidate would start."""
    return snapshot.version if loads(instance) else instance.version


def dealt(snapshot: Snapshot, instances: Sequence[Instance], given: Sequence[int]) -> list[Start]:
    """Deal the next groups in order, the first instance's share first.

    ``given`` is the number of groups of each instance. The share of an instance that is loading waits for it.
    """
    orders: list[Start] = []
    first = 0
    for instance, count in zip(instances, given, strict=True):
        if count and not loads(instance):
            groups = tuple(item.group for item in snapshot.next[first : first + count])
            orders.append(Start(worker=instance.worker, version=instance.version, groups=groups))
            first += count
    return orders
