"""The reason for a waiting step is one sentence: which groups, where, how long, and the next action."""

from typing import Any

import pytest

from staleflow.protocols.consistency.ids import GroupId
from staleflow.protocols.wire.messages.status import Pin
from staleflow.servers.scheduler.lengths.durations import Durations
from staleflow.servers.scheduler.status.sentences import pinned, seconds, starved

COUNTS = {"leased": 4, "pushed": 17, "occupied": 3, "claimed": 0}


def pin(group: int = 117, version: int = 38, worker: str = "rollout-3", **more: Any) -> Pin:
    return Pin(group=group, version=version, worker=worker, **more)


def test_two_groups_on_one_engine_are_named_with_the_time_of_the_slower() -> None:
    pins = [pin(left_s=8.0), pin(118, left_s=20.4)]
    said = "step 41 waits for 2 groups of version 38 (117 and 118), on rollout-3, about 20 s left; policy: wait"
    assert pinned(41, pins, 2, "wait") == said


def test_many_groups_are_counted_and_the_first_two_are_named() -> None:
    pins = [pin(group, 37 + group % 2, f"rollout-{group}") for group in range(4)]
    said = "step 41 waits for 9 groups of versions 37 to 38 (0, 1 and 7 more), on rollout-0, rollout-1 and 2 more; "
    assert pinned(41, pins, 9, "drop") == f"{said}policy: drop"


@pytest.mark.parametrize(
    ("more", "where"),
    [
        ({}, "on rollout-3"),
        ({"so_far_s": 12.0}, "on rollout-3, for 12 s so far"),
        ({"so_far_s": 0.4}, "on rollout-3"),
        ({"so_far_s": 12.0, "left_s": 0.2}, "on rollout-3, about 1 s left"),
        ({"lost_within_s": 30.0, "left_s": 2.0}, "on rollout-3, which is silent: its lease ends within 30 s"),
        ({"worker": ""}, "in stages"),
        ({"worker": "", "stages": ["judge"]}, "in the stage judge"),
        ({"worker": "", "stages": ["judge", "reward"]}, "in the stages judge and reward"),
    ],
)
def test_where_a_group_is_and_how_long(more: dict[str, Any], where: str) -> None:
    assert pinned(1, [pin(**more)], 1, "wait") == f"step 1 waits for group 117 of version 38, {where}; policy: wait"


def test_groups_on_engines_and_in_stages_are_both_told() -> None:
    pins = [pin(), pin(118, worker="", stages=["reward"])]
    assert ", on rollout-3 and in the stage reward; " in pinned(1, pins, 2, "wait")


def test_a_starved_step_says_what_is_under_way() -> None:
    said = "step 12 waits for groups: 3 of 8 are ready, 4 are being generated, 17 are in stages"
    assert starved(12, 8, COUNTS) == said
    one = COUNTS | {"leased": 1, "pushed": 1}
    assert starved(12, 8, one).endswith("3 of 8 are ready, 1 is being generated, 1 is in stages")
    assert starved(12, 8, COUNTS, 3.6) == f"{said}, about 4 s left"
    assert starved(12, 8, COUNTS | {"claimed": 2}) == said.replace("ready", "ready (2 with the trainer)")


@pytest.mark.parametrize(
    ("value", "words"), [(0.1, "1 s"), (20.4, "20 s"), (89, "89 s"), (150, "2 min"), (9000, "2.5 h")]
)
def test_time_reads_as_people_say_it(value: float, words: str) -> None:
    assert seconds(value) == words


def done(durations: Durations, *took_ms: int) -> None:
    for group, took in enumerate(took_ms):
        durations.begin(GroupId(group), 0)
        durations.end(GroupId(group), took)


def test_the_time_left_is_that_of_groups_that_took_longer_than_this_one_so_far() -> None:
    durations = Durations()
    done(durations, 1_000, 1_000, 1_000, 10_000, 12_000, 20_000)
    durations.begin(GroupId(99), 100_000)
    assert durations.left_s(GroupId(99), 100_000) == 10.0
    assert durations.so_far_s(GroupId(99), 104_000) == 4.0
    assert durations.left_s(GroupId(99), 104_000) == 8.0
    assert durations.left_s(GroupId(99), 111_000) is None, "two are too few"
    assert durations.left_s(GroupId(5), 0) is None


def test_work_that_came_to_nothing_says_nothing_about_others() -> None:
    durations = Durations()
    durations.begin(GroupId(1), 0)
    durations.forget((GroupId(1), GroupId(2)))
    durations.end(GroupId(1), 50)
    assert durations.so_far_s(GroupId(1), 50) is None
    done(durations, 100, 200)
    durations.begin(GroupId(9), 0)
    assert durations.left_s(GroupId(9), 0) is None


def test_the_pace_of_the_last_ones_says_when_there_are_enough() -> None:
    durations = Durations()
    done(durations, 1_000, 2_000)
    assert durations.until_s(4) is None
    done(durations, 3_000)
    assert (durations.until_s(4), durations.until_s(-1)) == (4.0, 0.0)
