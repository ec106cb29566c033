"""Migration moves the right groups to the right instances, and no others."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from staleflow.protocols.consistency.ids import GroupId, LeaseId, Lineage, Version, WorkerId
from staleflow.protocols.coordination.migration import (
    MAX_MOVES,
    MIN_AGE_MS,
    MIN_LEFT_S,
    Migration,
    crowded_out,
    expected_s,
    move,
    pace,
)
from staleflow.protocols.coordination.view import Cost, Flight, Instance, Move, Snapshot
from tests.protocols.coordination.views import COSTS

COST = Cost(k1=0.0, k2=0.01, k3=0.001, k4=0.0)
"""100 steps a second up to ten samples, then fewer."""


def instance(name: str, **known: Any) -> Instance:
    """Instance with 8 slots that may hold 4 groups of 4 samples; ``known`` overrides its fields."""
    fixed: dict[str, Any] = {
        "lineage": Lineage(0), "version": Version(3), "usable": True, "behind": False, "pulling": False,
        "held": 0, "capacity": 4, "slots": 8,
    }  # fmt: skip
    return Instance(worker=WorkerId(name), **fixed | known)


def flight(group: int, worker: str, *, age_ms: int = 60_000, **known: Any) -> Flight:
    """Flight of a group under the lease 100 + its number; ``known`` overrides its fields."""
    return Flight(
        group=GroupId(group),
        lease=LeaseId(100 + group),
        worker=WorkerId(worker),
        version=Version(3),
        deadline=None,
        age_ms=age_ms,
        **known,
    )


def snapshot(*instances: Instance, flights: tuple[Flight, ...], pinning: tuple[Flight, ...] = ()) -> Snapshot:
    return Snapshot(
        lineage=Lineage(0),
        version=Version(3),
        instances=instances,
        room={},
        next=(),
        group_size=4,
        batch_size=4,
        max_staleness=3,
        waits=bool(pinning),
        pinning=pinning,
        flights=flights,
    )


def moves(seen: Snapshot, migration: Migration = "idle", gap: float = 2.0, given: tuple[str, ...] = ()) -> list[Any]:
    """Return the moved groups with their targets."""
    orders = move(seen, migration, gap, {WorkerId(name) for name in given})
    of = {flight.group: flight for flight in seen.flights}
    assert all((order.lease, order.worker) == (of[order.group].lease, of[order.group].worker) for order in orders)
    return [(int(order.group), order.to) for order in orders]


CROWD = instance("a", held=4, running=8, waiting=8)
"""Four groups of four on eight slots: two groups wait."""
FOUR = tuple(flight(group, "a") for group in range(4))


def test_what_waits_goes_to_who_has_nothing_to_do_the_newest_leases_first() -> None:
    seen = snapshot(CROWD, instance("b"), flights=FOUR)
    assert move(seen, "idle", 2.0, ()) == [
        Move(group=GroupId(3), lease=LeaseId(103), worker=WorkerId("a"), to=WorkerId("b")),
        Move(group=GroupId(2), lease=LeaseId(102), worker=WorkerId("a"), to=WorkerId("b")),
    ]
    assert move(seen, "none", 2.0, ()) == []


def test_several_idle_instances_share_what_waits() -> None:
    assert moves(snapshot(CROWD, instance("b"), instance("c"), flights=FOUR)) == [(3, "b"), (2, "c")]


def test_groups_that_pin_go_first_and_to_the_fastest() -> None:
    slow, fast = instance("b", cost=Cost(k1=0, k2=0.02, k3=0, k4=0)), instance("c", cost=COST)
    crowd = instance("a", held=4, running=8, waiting=4)
    assert moves(snapshot(crowd, slow, fast, flights=FOUR, pinning=FOUR[1:2])) == [(1, "c")]


@pytest.mark.parametrize(
    "target",
    [
        pytest.param(instance("b", held=1), id="has a group"),
        pytest.param(instance("b", held=1, coming=1), id="is about to get one"),
        pytest.param(instance("b", running=1), id="writes"),
        pytest.param(instance("b", pulling=True), id="loads weights"),
        pytest.param(instance("b", usable=False), id="has weights that were abandoned"),
        pytest.param(instance("b", version=Version(2)), id="has older weights than those that wrote last"),
        pytest.param(instance("b", capacity=0), id="holds nothing"),
    ],
)
def test_who_is_not_idle_or_cannot_go_on_gets_nothing(target: Instance) -> None:
    assert moves(snapshot(CROWD, target, flights=FOUR)) == []


def test_newer_weights_may_follow_on_older_ones() -> None:
    assert moves(snapshot(CROWD, instance("b", version=Version(4)), flights=FOUR))[0] == (3, "b")


def test_nothing_moves_to_who_begins_new_groups_in_this_cycle() -> None:
    assert moves(snapshot(CROWD, instance("b"), flights=FOUR), given=("b",)) == []


def test_a_group_that_moved_or_began_a_moment_ago_stays_and_so_does_a_spare() -> None:
    young, spare, old = flight(8, "a", age_ms=MIN_AGE_MS - 1), flight(9, "a", spare=True), flight(7, "a")
    crowd = instance("a", held=3, running=8, waiting=12)
    assert moves(snapshot(crowd, instance("b"), flights=(old, young, spare))) == [(7, "b")]
    assert moves(snapshot(crowd, instance("b"), flights=(old, flight(8, "a", age_ms=MIN_AGE_MS), spare)))[0] == (8, "b")


def test_a_group_that_has_nearly_ended_stays() -> None:
    """At a hundred steps a second, each step writes one token of every running sample."""
    crowd = instance("a", held=3, running=8, waiting=8, cost=COST)
    assert pace(crowd) == 100.0
    ending, early = flight(1, "a", age_ms=10_000, length=1100.0), flight(2, "a", age_ms=10_000, length=1300.0)
    late = flight(0, "a", age_ms=10_000, length=900.0)  # past every expectation: the remainder is unknown
    assert [expected_s(each, 100.0) for each in (ending, early, late)] == [1.0, 3.0, 0.0]
    assert 1.0 < MIN_LEFT_S < 3.0
    assert moves(snapshot(crowd, instance("b"), flights=(late, ending, early))) == [(2, "b"), (0, "b")]


def test_what_was_written_before_a_move_is_not_to_be_written_again() -> None:
    """At a hundred steps a second: 2,000 tokens before the last move, 1,000 since."""
    crowd = instance("a", held=3, running=8, waiting=8, cost=COST)
    ending, early = (flight(n, "a", age_ms=10_000, length=n, written=2000.0) for n in (3100, 3300))
    assert [expected_s(each, 100.0) for each in (ending, early)] == [1.0, 3.0]
    (order,) = move(snapshot(crowd, instance("b"), flights=(ending, early)), "idle", 2.0, ())
    assert (order.group, order.written) == (3300, 3000.0)


def test_a_group_that_moved_does_not_pass_for_the_one_with_most_to_write() -> None:
    a = instance("a", held=8, capacity=8, slots=30, running=30, cost=COST)
    b = instance("b", held=1, slots=30, running=4, cost=COST)
    moved, begun = flight(1, "a", length=9000, written=6000.0), flight(2, "a", length=8000)
    assert moves(snapshot(a, b, flights=(moved, begun)), "throughput", gap=2.9) == [(2, "b")]


def test_few_groups_move_at_once() -> None:
    crowd = instance("a", held=40, capacity=40, running=8, waiting=152)
    flights = tuple(flight(group, "a") for group in range(40))
    assert len(moves(snapshot(crowd, instance("b", capacity=40, slots=64), flights=flights))) == MAX_MOVES


def test_no_more_go_than_wait_those_that_are_told_to_already_counted() -> None:
    """Two groups wait; one of the four is already moving and no longer a flight."""
    assert moves(snapshot(CROWD, instance("b"), flights=FOUR[:3])) == [(2, "b")]
    assert moves(snapshot(CROWD, instance("b"), flights=FOUR[:2])) == []


def test_what_is_about_to_begin_does_not_wait_for_a_slot_and_what_finds_the_cache_full_does() -> None:
    beginning = instance("a", held=4, running=4, waiting=4)
    assert (crowded_out(beginning), crowded_out(CROWD)) == (0, 8)
    assert moves(snapshot(beginning, instance("b"), flights=FOUR)) == []
    full = instance("a", held=4, running=4, waiting=4, kv_used=0.97)
    assert moves(snapshot(full, instance("b"), flights=FOUR)) == [(3, "b")]


@pytest.mark.parametrize(
    "known",
    [
        pytest.param({"waiting": 2, "running": 4, "slots": 0}, id="its own wait, for whatever"),
        pytest.param({"waiting": 2, "running": 4, "kv_used": 0.97}, id="its own wait for cache"),
        pytest.param({"running": 4, "kv_used": 0.97}, id="its cache is full"),
        pytest.param({"running": 4, "kv_tokens": 4_000, "kv_capacity": 7_500}, id="its cache will be"),
        pytest.param({"running": 4, "waiting": 4, "kv_tokens": 4_000, "kv_capacity": 12_000}, id="of those that begin"),
        pytest.param(
            {"running": 4, "kv_tokens": 4_000, "kv_capacity": 12_000, "coming": 1}, id="of those on their way"
        ),
    ],
)
def test_nothing_goes_to_wait_elsewhere(known: dict[str, Any]) -> None:
    """A moved group brings some thousand tokens for each of its four samples."""
    crowd = replace(CROWD, kv_tokens=8_000)
    target = instance("b", **{"held": 1, "slots": 100, "capacity": 9, "kv_capacity": 100_000} | known)
    free = replace(target, waiting=0, coming=0, slots=100, kv_used=0.5, kv_capacity=13_000)
    assert moves(snapshot(crowd, target, flights=FOUR), "throughput") == []
    assert moves(snapshot(crowd, free, flights=FOUR), "throughput") == [(3, "b"), (2, "b")]


def test_the_cache_must_hold_a_group_at_its_end_unless_the_instance_is_idle() -> None:
    long = tuple(flight(group, "a", length=3_000.0) for group in range(4))
    busy = instance("b", held=1, slots=100, running=1, kv_tokens=1, kv_capacity=12_000)
    assert moves(snapshot(CROWD, busy, flights=long), "throughput") == []
    assert moves(snapshot(CROWD, replace(busy, kv_capacity=13_000), flights=long), "throughput") == [(3, "b")]
    idle = instance("b", slots=100, kv_capacity=10_000)
    assert moves(snapshot(CROWD, idle, flights=long)) == [(3, "b")], "one, whatever it needs"


def test_samples_that_wait_for_others_of_their_own_group_stay() -> None:
    """The samples would wait at the target too, and the target would be ordered to move the group as well."""
    wide = instance("a", held=1, running=2, waiting=2, slots=0, kv_used=0.97)
    assert moves(snapshot(wide, instance("b", slots=0), flights=FOUR[:1])) == []
    assert moves(snapshot(replace(wide, held=2), instance("b", slots=0), flights=FOUR[:2])) == [(1, "b")]


INSTANCES = st.builds(
    instance,
    st.just("a"),
    held=st.just(4),
    capacity=st.sampled_from([4, 9]),
    running=st.integers(0, 20),
    waiting=st.integers(0, 20),
    slots=st.sampled_from([0, 8, 16, 256]),
    kv_used=st.sampled_from([0.0, 0.5, 0.94, 0.99]),
    kv_tokens=st.integers(0, 10_000),
    kv_capacity=st.sampled_from([0, 10_000]),
    tokens_per_s=st.sampled_from([0.0, 100.0, 1000.0]),
    cost=st.none() | COSTS,
)
GAPS = st.sampled_from([1.0, 1.01, 2.0])


def groups_of(worker: str, first: int) -> tuple[Flight, ...]:
    return tuple(flight(group, worker, length=2000.0 * (group % 3)) for group in range(first, first + 4))


@given(INSTANCES, GAPS)
def test_equal_instances_move_nothing(one: Instance, gap: float) -> None:
    other = replace(one, worker=WorkerId("b"))
    assert moves(snapshot(one, other, flights=groups_of("a", 0) + groups_of("b", 4)), "throughput", gap) == []


@given(INSTANCES, INSTANCES, GAPS)
def test_no_two_instances_exchange_groups(one: Instance, other: Instance, gap: float) -> None:
    seen = snapshot(one, replace(other, worker=WorkerId("b")), flights=groups_of("a", 0) + groups_of("b", 4))
    assert len({to for _, to in moves(seen, "throughput", gap)}) <= 1


def test_no_gap_is_so_small_that_equal_instances_exchange_groups() -> None:
    flat = Cost(k1=0.0, k2=0.01, k3=0.0, k4=0.0)
    one, other = (instance(name, held=4, capacity=9, running=5, slots=0, cost=flat) for name in "ab")
    seen = snapshot(one, other, flights=groups_of("a", 0) + groups_of("b", 4))
    assert moves(seen, "throughput", gap=1.0) == []
    faster = replace(other, cost=replace(flat, k2=0.0095))
    assert {to for _, to in moves(snapshot(one, faster, flights=seen.flights), "throughput", gap=1.0)} == {"b"}


def test_nobody_gets_more_samples_than_it_has_slots_for() -> None:
    assert moves(snapshot(CROWD, instance("b", slots=7), flights=FOUR)) == [(3, "b")]
    assert moves(snapshot(CROWD, instance("b", slots=0), flights=FOUR)) == [(3, "b"), (2, "b")], "it does not say"


def test_a_throughput_gap_moves_the_longest_remainder_to_where_it_is_written_so_much_faster() -> None:
    """30 samples at a: 33 steps a second. At b, which has 4 samples: 100 with 4 more, 83 with 8, 62 with 12."""
    a = instance("a", held=8, capacity=8, slots=30, running=30, cost=COST)
    b = instance("b", held=1, slots=30, running=4, cost=COST)
    flights = (flight(1, "a", length=4000), flight(2, "a", length=9000), flight(3, "a"), flight(9, "b", length=9000))
    seen = snapshot(a, b, flights=flights)
    assert moves(seen, "throughput", gap=3.1) == []
    assert moves(seen, "throughput", gap=2.9) == [(2, "b")]
    assert moves(seen, "throughput", gap=2.0) == [(2, "b"), (1, "b")]
    assert moves(seen, "throughput", gap=1.5) == [(2, "b"), (1, "b"), (3, "b")]
    assert moves(seen, "idle") == []


def test_what_moves_takes_its_tokens_along() -> None:
    """With a thousand tokens per sample, four more samples at b make its step as slow as the eight at a."""
    cost = Cost(k1=1e-5, k2=0.01, k3=0.0, k4=0.0)
    a = instance("a", held=2, running=8, kv_tokens=8000, cost=cost)
    b = instance("b", held=1, slots=16, running=4, kv_tokens=4000, cost=cost)
    flights = (flight(1, "a", length=9000), flight(2, "a", length=9000))
    assert moves(snapshot(a, b, flights=flights), "throughput", gap=1.5) == []
    short = instance("a", held=2, running=8, kv_tokens=8000, cost=Cost(k1=2e-5, k2=0.01, k3=0.0, k4=0.0))
    assert moves(snapshot(short, b, flights=flights), "throughput", gap=1.5) == [(1, "b")]


def test_a_gap_is_told_by_what_was_measured_where_no_model_is_fitted() -> None:
    a = instance("a", held=4, running=8, tokens_per_s=80.0)
    b = instance("b", held=1, running=4, tokens_per_s=400.0)
    assert moves(snapshot(a, b, flights=FOUR), "throughput", gap=4.0) == [(0, "b")]
    assert moves(snapshot(a, b, flights=FOUR), "throughput", gap=6.0) == []
    unknown = instance("b", held=1, running=4)
    assert moves(snapshot(a, unknown, flights=FOUR), "throughput", gap=1.0) == []


def test_groups_on_their_way_and_those_just_arrived_count_before_they_are_reported() -> None:
    a = instance("a", held=8, capacity=8, slots=30, running=30, cost=COST)
    arrived = tuple(flight(group, "b", age_ms=MIN_AGE_MS - 1) for group in (20, 21))
    flights = (*arrived, flight(1, "a", length=9000))
    many = instance("b", held=4, coming=2, capacity=8, running=4, cost=COST)
    assert moves(snapshot(a, many, flights=flights), "throughput", gap=2.0) == []
    assert moves(snapshot(a, instance("b", held=1, running=4, cost=COST), flights=flights[2:]), "throughput") == [
        (1, "b")
    ]


def test_throughput_moves_what_waits_first_also_to_who_has_only_a_few_slots_free_and_no_group_twice() -> None:
    crowd = instance("a", held=4, running=8, waiting=8, cost=Cost(k1=0.0, k2=0.03, k3=0.0, k4=0.0))
    free = instance("c", held=1, running=4, slots=16, cost=COST)
    assert moves(snapshot(crowd, free, flights=FOUR), "throughput", gap=3.5) == [(3, "c"), (2, "c")]
    assert moves(snapshot(crowd, free, flights=FOUR), "throughput", gap=1.5) == [(3, "c"), (2, "c"), (0, "c")]
    assert moves(snapshot(crowd, free, flights=FOUR), "idle") == []
