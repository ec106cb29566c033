"""The clock of leases and silence counts only the time in which this process could receive messages."""

from staleflow.process.clock import MAX_GAP_S, RunningClock

MS = 1_000_000


class Hands:
    """A clock that the test advances."""

    def __init__(self) -> None:
        self.ns = 5_000 * MS

    def now_ns(self) -> int:
        return self.ns

    def now_ms(self) -> int:
        return self.ns // MS

    def unix_ns(self) -> int:
        return 1_700_000_000_000 * MS + self.ns


def test_time_that_is_read_often_passes_as_it_does_for_everybody() -> None:
    real = Hands()
    clock = RunningClock(real)
    assert clock.now_ns() == real.now_ns()
    for _ in range(1_000):
        real.ns += round(MAX_GAP_S * 1e9)
        assert clock.now_ns() == real.now_ns()
    assert clock.paused_s == 0


def test_a_pause_counts_as_the_longest_gap_that_counts() -> None:
    real = Hands()
    clock = RunningClock(real)
    before = clock.now_ns()
    real.ns += 60_000 * MS
    assert clock.now_ns() - before == round(MAX_GAP_S * 1e9)
    assert clock.paused_s == 60 - MAX_GAP_S
    real.ns += 50 * MS
    assert clock.now_ns() - before == round(MAX_GAP_S * 1e9) + 50 * MS
    assert clock.now_ms() == clock.now_ns() // MS


def test_labels_for_people_stay_real() -> None:
    real = Hands()
    clock = RunningClock(real)
    clock.now_ns()
    real.ns += 60_000 * MS
    clock.now_ns()
    assert clock.unix_ns() == real.unix_ns()
