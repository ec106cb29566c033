"""Which instance gets the next groups."""

from staleflow.protocols.consistency.ids import Lineage, Version, WorkerId
from staleflow.protocols.coordination.routing import least_loaded, round_robin
from staleflow.protocols.coordination.view import Instance, Snapshot, Start


def instance(name: str, *, held: int = 0, capacity: int = 4, version: int = 3, usable: bool = True) -> Instance:
    return Instance(
        worker=WorkerId(name),
        lineage=Lineage(0),
        version=Version(version),
        usable=usable,
        behind=False,
        pulling=False,
        held=held,
        capacity=capacity,
    )


def snapshot(*instances: Instance, room: int = 100, prompts: int = 100, last_served: str | None = None) -> Snapshot:
    return Snapshot(
        lineage=Lineage(0),
        version=Version(3),
        instances=instances,
        room={Version(version): room for version in range(4)},
        prompts=prompts,
        last_served=None if last_served is None else WorkerId(last_served),
    )


def start(name: str, num_groups: int, version: int = 3) -> Start:
    return Start(worker=WorkerId(name), version=Version(version), num_groups=num_groups)


def test_the_least_loaded_catches_up_first() -> None:
    assert least_loaded(snapshot(instance("a", held=3), instance("b", held=1), room=3)) == [
        start("a", 1),
        start("b", 2),
    ]


def test_load_is_a_share_of_capacity() -> None:
    assert least_loaded(snapshot(instance("a", held=2, capacity=4), instance("b", held=3, capacity=32), room=1)) == [
        start("b", 1)
    ]


def test_among_equals_the_longest_attached_goes_first() -> None:
    assert least_loaded(snapshot(instance("a"), instance("b"), room=1)) == [start("a", 1)]


def test_nobody_gets_more_than_it_can_hold() -> None:
    assert least_loaded(snapshot(instance("a", held=3), instance("b", held=4))) == [start("a", 1)]
    assert round_robin(snapshot(instance("a", held=3), instance("b", held=5))) == [start("a", 1)]


def test_no_more_starts_than_there_are_prompts() -> None:
    assert least_loaded(snapshot(instance("a"), instance("b"), prompts=3)) == [start("a", 2), start("b", 1)]
    assert round_robin(snapshot(instance("a"), instance("b"), prompts=3)) == [start("a", 2), start("b", 1)]
    assert least_loaded(snapshot(instance("a"), prompts=0)) == []


def test_room_is_shared_by_all_versions() -> None:
    view = snapshot(instance("a", version=2), instance("b", version=3))
    narrow = Snapshot(
        lineage=view.lineage,
        version=view.version,
        instances=view.instances,
        room={Version(2): 1, Version(3): 3},
        prompts=100,
    )
    for strategy in (least_loaded, round_robin):
        started = {order.version: order.num_groups for order in strategy(narrow)}
        assert sum(started.values()) <= 3
        assert started.get(Version(2), 0) <= 1


def test_without_room_nothing_starts() -> None:
    assert least_loaded(snapshot(instance("a"), room=0)) == []
    assert round_robin(snapshot(instance("a"), room=0)) == []


def test_an_instance_with_abandoned_weights_or_without_any_starts_nothing() -> None:
    assert least_loaded(snapshot(instance("a", usable=False), instance("b", version=-1, usable=False))) == []


def test_round_robin_goes_on_after_the_one_served_last() -> None:
    trio = (instance("a"), instance("b"), instance("c"))
    assert round_robin(snapshot(*trio, room=2)) == [start("a", 1), start("b", 1)]
    assert round_robin(snapshot(*trio, room=2, last_served="b")) == [start("c", 1), start("a", 1)]
    assert round_robin(snapshot(*trio, room=1, last_served="gone")) == [start("a", 1)]


def test_round_robin_goes_round_until_all_are_full() -> None:
    assert round_robin(snapshot(instance("a", held=3), instance("b", held=1))) == [start("a", 1), start("b", 3)]
