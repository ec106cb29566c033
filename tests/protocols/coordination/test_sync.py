"""An instance loads newer weights exactly when its sync strategy allows."""

from typing import get_args

import msgspec
import pytest

from staleflow.protocols.consistency.ids import Version
from staleflow.protocols.coordination.sync import MAX_AT_ONCE, Sync, load
from tests.protocols.coordination import views
from tests.protocols.coordination.views import behind, instance, snapshot

ALL: tuple[Sync, ...] = get_args(Sync)


def test_greedy_loads_at_once_whatever_runs() -> None:
    seen = snapshot(instance("a"), behind("b", running=9), behind("c", waiting=1))
    assert load(seen, "greedy", 1) == [views.load("b"), views.load("c")]


def test_threshold_waits_until_little_enough_is_left_to_write() -> None:
    seen = snapshot(behind("a", running=5), behind("b", running=4), behind("c", running=3, waiting=2), behind("d"))
    assert load(seen, "threshold", 4) == [views.load("b"), views.load("d")]


def test_idle_waits_until_nothing_is_left() -> None:
    seen = snapshot(behind("a", running=1), behind("b", waiting=1), behind("c"))
    assert load(seen, "idle", 8) == [views.load("c")]


def test_groups_that_an_instance_does_not_show_yet_count() -> None:
    seen = snapshot(behind("a", held=3, ordered=2), behind("b", held=3, ordered=1), group_size=4)
    assert load(seen, "threshold", 4) == [views.load("b")]


@pytest.mark.parametrize("sync", ALL)
def test_who_could_not_load_tries_again_without_waiting_for_a_rest_that_need_not_come(sync: Sync) -> None:
    assert load(snapshot(behind("a", running=50, stuck=True)), sync, 1) == [views.load("a")]
    assert load(snapshot(behind("a", running=50, stuck=True, pulling=True)), sync, 1) == []


@pytest.mark.parametrize("sync", ALL)
def test_weights_that_no_history_has_any_more_are_replaced_at_once(sync: Sync) -> None:
    assert load(snapshot(behind("a", running=50, usable=False)), sync, 1) == [views.load("a")]


@pytest.mark.parametrize("sync", ALL)
def test_nobody_is_told_twice_or_without_need_or_before_version_0(sync: Sync) -> None:
    assert load(snapshot(behind("a", pulling=True), instance("b")), sync, 8) == []
    assert load(snapshot(behind("a")), sync, 8) == [views.load("a")]
    before = msgspec.structs.replace(snapshot(behind("a")), version=Version(-1))
    assert load(before, sync, 8) == []


@pytest.mark.parametrize("sync", ALL)
def test_a_crowd_is_told_in_parts(sync: Sync) -> None:
    crowd = [behind(f"w{n}", pulling=False) for n in range(MAX_AT_ONCE + 5)]
    assert [order.worker for order in load(snapshot(*crowd), sync, 8)] == [i.worker for i in crowd[:MAX_AT_ONCE]]
    told = [behind(f"w{n}", pulling=n < MAX_AT_ONCE) for n in range(MAX_AT_ONCE + 5)]
    assert [order.worker for order in load(snapshot(*told), sync, 8)] == [i.worker for i in crowd[-5:]]
