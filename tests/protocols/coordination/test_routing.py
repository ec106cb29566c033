"""Routing starts the next groups on the instance that its strategy prefers, within room and capacity."""

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from staleflow.protocols.consistency.ids import GroupId, Version, WorkerId
from staleflow.protocols.coordination.routing import Routing, least_loaded, round_robin, route, sticky
from staleflow.protocols.coordination.view import Next, Snapshot
from tests.protocols.coordination.views import behind, check_orders, instance, snapshot, snapshots, start

ALL: tuple[Routing, ...] = get_args(Routing)


@given(seen=snapshots(), routing=st.sampled_from(ALL), min_gain=st.sampled_from([0.0, 0.3, 1.0]))
def test_orders_keep_to_room_places_weights_and_the_order_of_the_next_groups(
    seen: Snapshot, routing: Routing, min_gain: float
) -> None:
    orders = route(seen, routing, min_gain)
    check_orders(seen, orders)
    assert orders == route(seen, routing, min_gain)
    assert len({order.worker for order in orders}) == len(orders)


@given(seen=snapshots(), routing=st.sampled_from(ALL))
def test_a_place_a_group_and_room_are_never_left_together(seen: Snapshot, routing: Routing) -> None:
    """The rule holds when all instances have the newest weights and no group is held back."""
    seen = snapshot(
        *(instance(i.worker, held=i.held, capacity=i.capacity, cost=i.cost) for i in seen.instances),
        room=seen.room[Version(3)],
        groups=len(seen.next),
    )
    started = sum(len(order.groups) for order in route(seen, routing, 0.0))
    assert started == min(sum(i.free for i in seen.instances), len(seen.next), seen.room[Version(3)])


@pytest.mark.parametrize("routing", ALL)
def test_without_room_or_groups_nothing_starts(routing: Routing) -> None:
    assert route(snapshot(instance("a"), room=0), routing, 0.0) == []
    assert route(snapshot(instance("a"), groups=0), routing, 0.0) == []


@pytest.mark.parametrize("routing", ALL)
def test_an_instance_with_abandoned_weights_or_without_any_starts_nothing(routing: Routing) -> None:
    seen = snapshot(instance("a", usable=False), instance("b", version=Version(-1), usable=False, behind=True))
    assert route(seen, routing, 0.0) == []


@pytest.mark.parametrize("routing", ALL)
def test_an_instance_that_loads_keeps_its_share_of_what_is_next(routing: Routing) -> None:
    """Without this rule, the first ready instance would get every group that a new version admits."""
    seen = snapshot(instance("a"), behind("b", pulling=True), room=4)
    assert route(seen, routing, 0.0) == [start("a", 0, 1)]
    assert route(snapshot(instance("a"), behind("b"), room=4), routing, 0.0) == [start("a", 0, 1, 2, 3)]
    stuck = behind("b", pulling=True, stuck=True)
    both = {order.worker: len(order.groups) for order in route(snapshot(instance("a"), stuck, room=4), routing, 0.0)}
    assert both == {"a": 2, "b": 2}


@pytest.mark.parametrize("routing", ALL)
def test_room_is_shared_by_all_versions(routing: Routing) -> None:
    seen = snapshot(behind("a", stuck=True), instance("b"), room=3, older=1)
    started = {order.version: len(order.groups) for order in route(seen, routing, 0.0)}
    assert 1 <= sum(started.values()) <= 3
    assert started.get(Version(2), 0) <= 1


def test_the_least_loaded_catches_up_first() -> None:
    assert least_loaded(snapshot(instance("a", held=3), instance("b", held=1), room=3)) == [
        start("a", 0),
        start("b", 1, 2),
    ]


def test_load_is_a_share_of_capacity() -> None:
    seen = snapshot(instance("a", held=2, capacity=4), instance("b", held=3, capacity=32), room=1)
    assert least_loaded(seen) == [start("b", 0)]


def test_among_equals_the_longest_attached_goes_first() -> None:
    assert least_loaded(snapshot(instance("a"), instance("b"), room=1)) == [start("a", 0)]


def test_nobody_gets_more_than_it_can_hold() -> None:
    assert least_loaded(snapshot(instance("a", held=3), instance("b", held=4))) == [start("a", 0)]
    assert round_robin(snapshot(instance("a", held=3), instance("b", held=5))) == [start("a", 0)]


def test_no_more_starts_than_there_are_groups() -> None:
    assert least_loaded(snapshot(instance("a"), instance("b"), groups=3)) == [start("a", 0, 1), start("b", 2)]
    assert round_robin(snapshot(instance("a"), instance("b"), groups=3)) == [start("a", 0, 1), start("b", 2)]


def test_round_robin_goes_on_after_the_one_served_last() -> None:
    trio = (instance("a"), instance("b"), instance("c"))
    assert round_robin(snapshot(*trio, room=2)) == [start("a", 0), start("b", 1)]
    assert round_robin(snapshot(*trio, room=2, last_served=WorkerId("b"))) == [start("c", 0), start("a", 1)]
    assert round_robin(snapshot(*trio, room=1, last_served=WorkerId("gone"))) == [start("a", 0)]


def test_round_robin_goes_round_until_all_are_full() -> None:
    assert round_robin(snapshot(instance("a", held=3), instance("b", held=1))) == [start("a", 0), start("b", 1, 2, 3)]


def at_home(*homes: str | None) -> tuple[Next, ...]:
    return tuple(
        Next(group=GroupId(group), home=None if home is None else WorkerId(home)) for group, home in enumerate(homes)
    )


def test_a_prompt_goes_back_to_where_it_was() -> None:
    seen = snapshot(instance("a"), instance("b", held=2), next=at_home("b", None, "b", "gone"))
    assert sticky(seen) == [start("a", 1, 3), start("b", 0, 2)]


def test_a_prompt_whose_place_is_full_goes_to_the_least_loaded() -> None:
    seen = snapshot(instance("a"), instance("b", held=3), instance("c", held=2), next=at_home("b", "b", "b"))
    assert sticky(seen) == [start("a", 1, 2), start("b", 0)]


def test_among_versions_a_prompt_goes_back_only_as_far_as_there_is_room() -> None:
    seen = snapshot(behind("a", stuck=True), instance("b"), room=3, older=1, next=at_home("a", "a", "a"))
    check_orders(seen, sticky(seen))
    assert sum(len(order.groups) for order in sticky(seen)) == sum(len(order.groups) for order in least_loaded(seen))
