"""An engine with free slots may hold more groups than its capacity; a full one, or one that queues, may not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from staleflow.protocols.coordination.migration import FULL_KV
from staleflow.protocols.coordination.overbooking import MAX_OVERBOOKING, overbooked


def most(
    *,
    held: int = 4,
    ordered: int = 0,
    started: int = 4,
    running: int = 6,
    waiting: int = 0,
    slots: int = 16,
    kv_used: float = 0.0,
) -> int:
    """The maximum of an engine with a capacity of four groups of four samples, of which six still run."""
    return overbooked(
        4,
        held=held,
        ordered=ordered,
        started=started,
        running=running,
        waiting=waiting,
        slots=slots,
        kv_used=kv_used,
    )


def test_the_last_samples_of_its_groups_leave_slots_for_more() -> None:
    assert most() == 7
    assert most(running=4) == 7
    assert most(running=3) == 8


def test_groups_that_will_start_there_take_slots() -> None:
    assert most(held=5, ordered=1) == 7
    assert most(held=7, ordered=3) == 7


@pytest.mark.parametrize("report", [{"running": 16}, {"waiting": 1}, {"kv_used": FULL_KV}, {"running": 0}])
def test_an_engine_without_free_slots_or_work_has_its_own_capacity(report: dict[str, int]) -> None:
    assert most(**report) == 4  # pyright: ignore[reportArgumentType]


@given(st.integers(0, 99), st.integers(0, 9), st.integers(1, 8), st.integers(1, 15))
def test_it_is_within_its_limits(held: int, ordered: int, started: int, running: int) -> None:
    assert 4 <= most(held=held, ordered=ordered, started=started, running=running) <= 4 * MAX_OVERBOOKING
