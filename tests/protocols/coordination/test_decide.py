"""One coordination cycle gives valid orders under any combination of strategies."""

from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from staleflow.protocols.consistency.ids import GroupId, LeaseId, Version, WorkerId
from staleflow.protocols.coordination.admission import Admission
from staleflow.protocols.coordination.decide import Strategies, decide
from staleflow.protocols.coordination.migration import Migration
from staleflow.protocols.coordination.routing import Routing
from staleflow.protocols.coordination.sync import Sync
from staleflow.protocols.coordination.view import Flight, Move, Snapshot, Start
from tests.protocols.coordination.views import behind, check_orders, instance, load, snapshot, snapshots, start


def chosen(**strategies: Any) -> Strategies:
    """Return the simplest choice of every strategy, except for the named ones."""
    plain: dict[str, Any] = {
        "routing": "least_loaded", "min_gain": 0.0, "sync": "greedy", "sync_threshold": 8,
        "migration": "none", "migration_gap": 2.0, "admission": "fill",
    }  # fmt: skip
    return Strategies(**plain | strategies)


CHOICES = st.builds(
    Strategies,
    routing=st.sampled_from(get_args(Routing)),
    min_gain=st.sampled_from([0.0, 0.5]),
    sync=st.sampled_from(get_args(Sync)),
    sync_threshold=st.just(4),
    migration=st.sampled_from(get_args(Migration)),
    migration_gap=st.just(2.0),
    admission=st.sampled_from(get_args(Admission)),
)


@given(seen=snapshots(), strategies=CHOICES)
def test_whatever_is_chosen_orders_can_be_carried_out(seen: Snapshot, strategies: Strategies) -> None:
    orders = decide(seen, strategies)
    check_orders(seen, orders)
    assert orders == decide(seen, strategies)


def test_who_is_behind_loads_and_starts_nothing() -> None:
    seen = snapshot(instance("a", capacity=2), behind("b"))
    assert decide(seen, chosen()) == [load("b"), start("a", 0, 1)]


@pytest.mark.parametrize("sync", ["threshold", "idle"])
def test_who_may_not_load_yet_starts_nothing_either_and_so_comes_to_load(sync: Sync) -> None:
    seen = snapshot(instance("a", capacity=2), behind("b", running=9))
    assert decide(seen, chosen(sync=sync)) == [start("a", 0, 1)]


def test_who_cannot_load_goes_on_with_what_it_has() -> None:
    stuck = behind("b", pulling=True, stuck=True, capacity=2)
    assert decide(snapshot(stuck), chosen(routing="round_robin")) == [start("b", 0, 1, version=2)]


def test_before_version_0_nothing_happens() -> None:
    empty = behind("b", version=Version(-1), usable=False)
    seen = msgspec.structs.replace(snapshot(empty), version=Version(-1), room={})
    assert decide(seen, chosen()) == []


def test_nothing_moves_to_who_begins_groups_in_the_same_cycle() -> None:
    queued = Flight(
        group=GroupId(7), lease=LeaseId(9), worker=WorkerId("a"), version=Version(3), deadline=None, age_ms=60_000
    )
    begun = msgspec.structs.replace(queued, group=GroupId(6), lease=LeaseId(8))
    seen = snapshot(instance("a", held=2, running=1, waiting=1), instance("b"), flights=(begun, queued), groups=1)
    assert decide(seen, chosen(migration="idle")) == [start("b", 0)]
    none_left = msgspec.structs.replace(seen, next=())
    assert decide(none_left, chosen(migration="idle")) == [
        Move(group=GroupId(7), lease=LeaseId(9), worker=WorkerId("a"), to=WorkerId("b"))
    ]


def test_just_in_time_starts_nothing_while_a_sealed_batch_is_there() -> None:
    seen = snapshot(instance("a", capacity=2), room=2, leased=4, sealed=4)
    assert decide(seen, chosen(admission="just_in_time")) == []
    assert decide(seen, chosen()) == [start("a", 0, 1)]
    nothing_sealed = msgspec.structs.replace(seen, sealed=0)
    assert decide(nothing_sealed, chosen(admission="just_in_time")) == [start("a", 0, 1)]


def test_a_decision_over_1024_instances_is_the_same_each_time() -> None:
    many = [instance(f"w{n}", held=n % 2, capacity=2) for n in range(1024)]
    seen = snapshot(*many, room=512, groups=1000)
    orders = decide(seen, chosen())
    assert orders == decide(seen, chosen())
    assert sum(len(order.groups) for order in orders if isinstance(order, Start)) == 512
