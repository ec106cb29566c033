"""A process measures its own pauses by the gaps between its ticks."""

import pytest

from staleflow.process.pauses import MIN_PAUSE_S, Pauses


def test_a_late_tick_is_a_pause_of_what_it_is_late_by() -> None:
    pauses = Pauses(0.5)
    assert pauses.tick(100.0) == 0
    assert pauses.tick(100.5) == 0
    assert pauses.tick(110.0) == pytest.approx(9.0)
    assert pauses.tick(110.5) == 0  # each pause is credited once


def test_jitter_is_no_pause_however_often_it_comes() -> None:
    pauses, now_s = Pauses(0.5), 0.0
    credited = 0.0
    for _ in range(1_000):
        now_s += 0.5 + 0.9 * MIN_PAUSE_S
        credited += pauses.tick(now_s)
    assert credited == 0
