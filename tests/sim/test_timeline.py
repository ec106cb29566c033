"""Virtual time runs events in order, one instant at a time, and settles each instant before the next."""

from staleflow.sim.timeline import Timeline


class Told:
    """A timeline and the record of its events with their times."""

    def __init__(self) -> None:
        self.timeline = Timeline()
        self.story: list[tuple[float, str]] = []

    def tell(self, what: str) -> None:
        self.story.append((self.timeline.now_s, what))

    def at(self, time_s: float, what: str) -> None:
        self.timeline.at(time_s, lambda: self.tell(what))


def test_things_happen_in_order_of_time_and_of_asking() -> None:
    told = Told()
    for time_s, what in ((2.0, "c"), (1.0, "a"), (1.0, "b")):
        told.at(time_s, what)
    assert told.timeline.run(lambda: False) is False
    assert told.story == [(1.0, "a"), (1.0, "b"), (2.0, "c")]


def test_an_instant_is_settled_once_everything_of_it_has_happened() -> None:
    told = Told()
    open_ends = [1]

    def settle() -> bool:
        told.tell("settled")
        if told.timeline.now_s != 1.0 or not open_ends:
            return False
        open_ends.pop()
        told.timeline.soon(lambda: told.tell("answer"))
        return True

    told.at(1.0, "a")
    told.timeline.at(1.0, lambda: told.timeline.soon(lambda: told.tell("b")))
    told.at(1.0, "c")
    told.timeline.run(lambda: len(told.story) > 5, settle)
    assert [what for _, what in told.story] == ["settled", "a", "b", "c", "settled", "answer"]


def test_what_is_late_happens_now_and_time_never_goes_back() -> None:
    told = Told()
    told.timeline.at(3.0, lambda: told.at(1.0, "late"))
    told.timeline.run(lambda: False)
    assert told.story == [(3.0, "late")]


def test_it_stops_when_it_is_told_to() -> None:
    told = Told()
    told.at(1.0, "a")
    told.at(2.0, "b")
    assert told.timeline.run(lambda: bool(told.story)) is True
    assert told.timeline.now_s == 1.0


def test_its_clock_never_says_zero_and_counts_in_nanoseconds() -> None:
    timeline = Timeline()
    begin = timeline.now_ns()
    assert begin > 0
    timeline.at(1.5, lambda: None)
    timeline.run(lambda: False)
    assert (timeline.now_ns() - begin, timeline.now_ms() - begin // 1_000_000) == (1_500_000_000, 1500)
