"""Admission limits the groups that are started, and just_in_time adapts its lead to the trainer's waits."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from staleflow.protocols.consistency.ids import Version
from staleflow.protocols.coordination.admission import MIN_WAIT, Pace, Step, admitted, first_paced, paced, places
from tests.protocols.coordination.views import instance, snapshot

BUSY = Step(seconds=20.0, pinned_s=0.0, starved_s=0.0, under_way=0.8)
PINNED = Step(seconds=60.0, pinned_s=40.0, starved_s=1.0, under_way=0.8)
STARVED = Step(seconds=25.0, pinned_s=0.0, starved_s=5.0, under_way=0.8)
"""At full speed, in 20 of the 25 seconds, one batch would be under way."""
CROWDED = Step(seconds=60.0, pinned_s=4.0, starved_s=36.0, under_way=0.8)
"""Gathered groups reach crowded engines: most of the wait is for the first batch of them."""


def after(*steps: Step, margin: float = 0.0) -> list[float]:
    """Return the lead after each of these steps, when the bound admits three batches."""
    pace, leads = Pace(lead=3.0, margin=margin), list[float]()
    for step in steps:
        pace = paced(pace, step, 3.0)
        leads.append(round(pace.lead, 2))
    return leads


def test_fill_takes_what_the_bound_admits() -> None:
    seen = snapshot(instance("a"), groups=9, leased=8, sealed=4)
    assert admitted(seen, "fill") is seen


def test_without_a_lead_just_in_time_takes_it_too_while_no_batch_is_sealed() -> None:
    seen = snapshot(instance("a"), groups=9, leased=8, sealed=0)
    assert admitted(seen, "just_in_time") is seen


def test_a_trainer_that_waits_gets_all_of_it() -> None:
    seen = snapshot(instance("a"), groups=9, leased=8, lead=1.5, waits=True)
    assert admitted(seen, "just_in_time") is seen


def test_while_it_trains_without_a_sealed_batch_the_lead_counts_but_for_a_whole_batch() -> None:
    seen = snapshot(instance("a"), groups=9, leased=2, lead=1.5)
    assert [item.group for item in admitted(seen, "just_in_time").next] == [0, 1, 2, 3]
    short = snapshot(instance("a"), groups=9, leased=2, lead=0.5)
    assert [item.group for item in admitted(short, "just_in_time").next] == [0, 1]


def test_with_a_sealed_batch_it_tops_up_to_its_lead() -> None:
    seen = snapshot(instance("a"), room=4, groups=9, leased=2, pushed=1, occupied=1, sealed=4, lead=1.5)
    assert [item.group for item in admitted(seen, "just_in_time").next] == [0, 1]
    more = snapshot(instance("a"), room=4, groups=9, leased=9, sealed=4, lead=1.5)
    assert admitted(more, "just_in_time").next == ()


def test_spares_do_not_count_as_groups_that_are_there() -> None:
    seen = snapshot(instance("a"), room=4, groups=9, leased=4, spares=3, sealed=4, lead=1.0)
    assert [item.group for item in admitted(seen, "just_in_time").next] == [0, 1, 2]


def test_room_that_engines_could_not_take_at_once_is_not_left_to_gather() -> None:
    """a has two places; b has four, but slots for fewer groups than it may hold."""
    seen = snapshot(
        instance("a", held=2), instance("b", capacity=9, slots=8), group_size=2, groups=30, leased=9, sealed=4, room=13
    )
    assert places(seen) == 6
    assert admitted(seen, "just_in_time") is seen
    less = msgspec.structs.replace(seen, room={Version(3): 12})
    assert admitted(less, "just_in_time").next == ()
    fed = msgspec.structs.replace(seen, lead=0.5)
    assert admitted(fed, "just_in_time").next == ()


def test_a_trainer_never_waits_for_groups_that_may_not_start() -> None:
    seen = snapshot(instance("a"), groups=9, occupied=3, waits=True, token_bound=True, lead=0.2)
    assert [item.group for item in admitted(seen, "just_in_time").next] == [0]


def test_under_the_token_bound_what_waits_counts_and_what_is_trained_does_not() -> None:
    seen = snapshot(instance("a"), groups=9, leased=2, occupied=1, token_bound=True, lead=2.0)
    assert [item.group for item in admitted(seen, "just_in_time").next] == [0, 1, 2, 3, 4]
    ahead = snapshot(instance("a"), groups=9, leased=2, occupied=1, sealed=4, token_bound=True, lead=2.0)
    assert [item.group for item in admitted(ahead, "just_in_time").next] == [0]
    trained = snapshot(instance("a"), groups=9, leased=2, sealed=4, training=4, token_bound=True, lead=1.0)
    assert [item.group for item in admitted(trained, "just_in_time").next] == [0, 1]


def test_the_lead_is_what_is_under_way_and_half_a_batch_that_gathers() -> None:
    assert after(BUSY, BUSY) == [1.3, 1.3]


def test_a_trainer_that_starves_wants_as_many_more_as_it_could_train_and_a_margin() -> None:
    assert after(STARVED, STARVED) == [1.69, 1.88]
    assert after(STARVED, margin=2.95) == [3.0]


def test_a_margin_that_is_not_needed_shrinks() -> None:
    assert after(*[BUSY] * 3, margin=0.1) == [1.39, 1.38, 1.37]
    assert after(BUSY, margin=0.005) == [1.3]


def test_while_long_groups_pin_the_step_there_is_no_lead_and_the_margin_stays() -> None:
    assert after(PINNED, PINNED) == [0.0, 0.0]
    assert after(PINNED, *[BUSY] * 20, margin=0.3)[-1] > 1.3


def test_groups_are_not_gathered_where_the_first_batch_of_them_costs_more_than_they_save() -> None:
    pace, gathers = Pace(lead=3.0, gather_s=30.0), list[bool]()
    for _ in range(20):
        pace = paced(pace, PINNED, 3.0)
        gathers.append(pace.gathers)
        assert pace.lead == (0.0 if pace.gathers else 3.0)
    waited = 41.0  # in every step: more than the cost of gathering, once the average shows it
    start = gathers.index(True)
    assert waited * (1 - 0.8**start) <= MIN_WAIT * 30.0 * 0.99**start
    assert waited * (1 - 0.8 ** (start + 1)) > MIN_WAIT * 30.0 * 0.99 ** (start + 1)
    assert all(gathers[start:])


def test_gathering_ends_once_it_mostly_starves_the_trainer_and_is_tried_again_later() -> None:
    pace = paced(Pace(lead=3.0), PINNED, 3.0)
    assert pace.gathers
    for _ in range(20):
        pace = paced(pace, CROWDED, 3.0)
    assert (pace.gathers, pace.lead) == (False, 3.0)
    tried = 0
    less = Step(seconds=60.0, pinned_s=30.0, starved_s=0.0, under_way=0.8)
    while not pace.gathers:
        pace, tried = paced(pace, less, 3.0), tried + 1
    assert 5 < tried < 100


def test_the_first_step_of_a_run_shows_the_cost_of_gathering() -> None:
    pace = first_paced(Pace(lead=3.0), 90.0, 3.0)
    assert pace.gather_s == 30.0
    assert not paced(pace, PINNED, 3.0).gathers


@given(
    st.lists(st.tuples(*[st.floats(0.1, 100), st.floats(0, 1), st.floats(0, 1), st.floats(0, 9)]), max_size=30),
    st.floats(1.0, 4.0),
)
def test_the_lead_stays_within_the_bound(steps: list[tuple[float, float, float, float]], most: float) -> None:
    pace = Pace(lead=most)
    for seconds, waits, pinned, under_way in steps:
        pinned_s, starved_s = waits * pinned * seconds, waits * (1 - pinned) * seconds
        pace = paced(pace, Step(seconds=seconds, pinned_s=pinned_s, starved_s=starved_s, under_way=under_way), most)
        assert 0.0 <= pace.lead <= most
        assert not (pace.gathers and pace.lead)


def test_a_wait_hardly_worth_the_name_is_put_up_with() -> None:
    hardly = Step(seconds=100.0, pinned_s=0.0, starved_s=0.9, under_way=0.8)
    assert after(hardly) == [1.31]
