"""The cost model routes groups to the instance where they add the most throughput."""

import pytest

from staleflow.protocols.coordination.cost import cost_model
from staleflow.protocols.coordination.view import Cost
from tests.protocols.coordination.views import FLAT, behind, instance, lengths, snapshot, start

SLOW = Cost(k1=0.0, k2=0.03, k3=0.003, k4=0.0)
"""Three times as slow as ``FLAT``."""
KV = Cost(k1=1e-6, k2=0.01, k3=0.0, k4=0.0)
"""A token in the cache costs 1e-6 s each step."""


def test_t_is_samples_over_the_seconds_of_a_step() -> None:
    cost = Cost(k1=1e-6, k2=0.01, k3=0.001, k4=0.002)
    assert cost.step_s(5, 1000) == pytest.approx(0.013)
    assert cost.step_s(20, 1000) == pytest.approx(0.023)
    assert cost.rate(20, 1000) == pytest.approx(20 / 0.023)
    assert Cost(k1=0.0, k2=0.0, k3=0.0, k4=0.0).rate(3, 3) == 0.0


def test_a_group_goes_where_it_adds_most() -> None:
    crowded = instance("a", running=12, held=12, capacity=100, cost=FLAT)
    roomy = instance("b", running=8, held=8, capacity=8 + 2, cost=FLAT)
    assert cost_model(snapshot(crowded, roomy, groups=2), 0.0) == [start("b", 0, 1)]
    assert cost_model(snapshot(crowded, roomy, groups=3), 0.0) == [start("a", 2), start("b", 0, 1)]


def test_a_fast_engine_takes_more_than_a_slow_one_until_it_is_full() -> None:
    fast = instance("a", capacity=100, cost=FLAT)
    slow = instance("b", capacity=100, cost=SLOW)
    started = {order.worker: len(order.groups) for order in cost_model(snapshot(fast, slow, groups=15), 0.1)}
    assert started == {"a": 10, "b": 5}


def test_equal_engines_get_equal_shares_though_their_fits_differ_a_little() -> None:
    better = Cost(k1=0.0, k2=0.0099, k3=0.001, k4=0.0)
    seen = snapshot(instance("a", capacity=9, cost=FLAT), instance("b", capacity=9, cost=better), groups=8)
    started = {order.worker: len(order.groups) for order in cost_model(seen, 0.0)}
    assert started == {"a": 4, "b": 4}


def test_a_full_cache_makes_an_engine_slow_and_is_not_overfilled() -> None:
    full = instance("a", running=1, held=1, capacity=9, kv_tokens=50_000, kv_capacity=51_000, cost=KV)
    other = instance("b", running=1, held=1, capacity=9, kv_tokens=1_000, kv_capacity=51_000, cost=KV)
    seen = snapshot(full, other, next=lengths(2000.0, 2000.0))
    assert cost_model(seen, 0.0) == [start("b", 0, 1)]
    assert cost_model(snapshot(full, next=lengths(2000.0)), 0.0) == []
    idle = instance("a", kv_capacity=1_000, cost=KV)
    assert cost_model(snapshot(idle, next=lengths(2000.0)), 0.0) == [start("a", 0)]


def test_a_group_waits_where_it_would_add_too_little() -> None:
    """The eleventh sample adds nothing: steps become longer in proportion to the tokens in each."""
    seen = snapshot(instance("a", running=8, held=8, capacity=100, cost=FLAT), groups=9)
    assert cost_model(seen, 0.5) == [start("a", 0, 1)]
    assert len(cost_model(seen, 0.0)[0].groups) == 9


def test_an_idle_engine_with_fewer_slots_than_a_group_has_samples_takes_one() -> None:
    seen = snapshot(instance("a", slots=8, cost=KV), groups=2, group_size=16)
    assert cost_model(seen, 1.0) == [start("a", 0)]


def test_no_group_waits_where_nobody_knows_what_it_would_add() -> None:
    seen = snapshot(instance("a", running=8, held=8, capacity=50), groups=9)
    assert len(cost_model(seen, 1.0)[0].groups) == 9


def test_slots_that_are_taken_add_nothing() -> None:
    seen = snapshot(
        instance("a", running=4, held=4, capacity=9, slots=4, cost=FLAT), instance("b", cost=FLAT), groups=3
    )
    assert cost_model(seen, 0.1) == [start("b", 0, 1, 2)]
    assert cost_model(snapshot(seen.instances[0]), 0.1) == []


def test_long_groups_start_first_and_on_the_least_loaded_engines() -> None:
    crowded = instance("a", running=2, held=2, kv_tokens=5_000, cost=KV)
    seen = snapshot(crowded, instance("b", cost=KV), instance("c", cost=KV), next=lengths(100.0, 8000.0, 200.0, 9000.0))
    assert cost_model(seen, 0.0) == [start("b", 3, 0), start("c", 1, 2)]


def test_a_group_of_unknown_length_is_taken_for_a_usual_one() -> None:
    seen = snapshot(instance("a", cost=KV), next=lengths(100.0, 0.0, 9000.0))
    assert cost_model(seen, 0.0) == [start("a", 2, 1, 0)]


def test_groups_that_an_engine_does_not_report_yet_count() -> None:
    told = instance("a", held=2, ordered=2, cost=FLAT)
    assert cost_model(snapshot(told, instance("b", cost=FLAT), groups=2), 0.0) == [start("b", 0, 1)]
    gone = instance("a", held=0, running=4, cost=FLAT)
    assert cost_model(snapshot(gone, instance("b", running=1, held=1, cost=FLAT), groups=1), 0.0) == [start("a", 0)]


def test_an_engine_that_is_not_fitted_yet_is_taken_for_a_usual_one() -> None:
    seen = snapshot(instance("a", capacity=100, cost=SLOW), instance("b", capacity=100), groups=4)
    assert [order.worker for order in cost_model(seen, 0.0)] == ["a", "b"]


def test_the_share_of_an_engine_that_loads_is_kept() -> None:
    seen = snapshot(instance("a", cost=FLAT), behind("b", pulling=True, cost=FLAT), room=4)
    assert cost_model(seen, 0.0) == [start("a", 0, 1)]
