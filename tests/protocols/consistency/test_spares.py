"""Spares are groups beyond the counted ones; a finished spare takes a free place or that of a leased group."""

from staleflow.protocols.consistency.effects import Dropped, DropWhy, Promoted, Released, ReleaseWhy, Reserved
from staleflow.protocols.consistency.groups import State
from staleflow.protocols.consistency.ids import GroupId, Version
from tests.protocols.consistency.scenes import Scene, code, seals


def full() -> Scene:
    """On-policy batches of two, two spares: 0 and 1 are counted, 2 and 3 are spares."""
    scene = Scene(max_staleness=0, batch_size=2, max_spares=2)
    scene.reserve(0, 1, 2, 3)
    return scene


def test_what_the_window_cannot_count_is_a_spare_up_to_the_limit() -> None:
    scene = Scene(max_staleness=0, batch_size=2, max_spares=2)
    assert scene.machine.room(Version(0)) == 4
    done = scene.reserve(0, 1, 2, 3)
    assert [effect.spare for effect in done if isinstance(effect, Reserved)] == [False, False, True, True]
    assert scene.machine.room(Version(0)) == 0
    assert code(scene.reserve(4)) == "busy"


def test_a_spare_that_is_done_takes_the_place_of_a_leased_group() -> None:
    scene = full()
    assert scene.finish(2)[1:] == (Promoted(group=GroupId(2), demoted=GroupId(1)),)
    assert (scene.view(2).spare, scene.view(1).spare) == (False, True)


def test_a_spare_that_is_done_takes_a_free_place_first() -> None:
    scene = full()
    scene.release(0)
    assert scene.finish(2)[1:] == (Promoted(group=GroupId(2), demoted=None),)
    assert scene.view(1).spare is False


def test_an_occupied_spare_is_promoted_when_a_place_becomes_free() -> None:
    scene = full()
    scene.push(0)
    scene.push(1)
    assert [type(effect).__name__ for effect in scene.finish(2)] == ["Occupied"], "only leased groups swap"
    assert scene.release(1, ReleaseWhy.FILTERED)[1:] == (Promoted(group=GroupId(2), demoted=None),)


def test_spares_that_come_too_late_are_surplus_when_the_step_rises() -> None:
    scene = full()
    scene.push(0)
    scene.push(1)
    scene.push(2)
    scene.occupy(2)
    scene.occupy(0)
    _, sealed, first, second = scene.occupy(1)
    assert seals((sealed,)) == [(0, (0, 1))]
    assert isinstance(first, Dropped)
    assert (first.group, first.why) == (2, DropWhy.SURPLUS)
    assert isinstance(second, Released)
    assert (second.group, second.why) == (3, ReleaseWhy.SURPLUS)
    assert scene.machine.retired(GroupId(2))
    assert scene.machine.retired(GroupId(3))


def test_a_spare_never_takes_the_place_of_a_group_that_is_due_later() -> None:
    scene = Scene(max_staleness=1, batch_size=1, max_spares=1)
    scene.reserve(0)
    scene.finish(0)
    scene.reserve(1)
    scene.push(1)
    scene.train(0)
    scene.reserve(2, version=1)
    scene.reserve(3, version=0)
    assert scene.view(3).spare
    assert [type(effect).__name__ for effect in scene.finish(3)] == ["Occupied"]
    assert scene.view(3).spare


def test_a_demoted_group_may_still_come_first_and_be_promoted_again() -> None:
    scene = full()
    scene.finish(2)
    assert scene.view(1).spare
    assert seals(scene.finish(1)) == [(0, (2, 1))]


def test_groups_that_a_rollback_returns_are_counted() -> None:
    scene = full()
    scene.finish(2, 3)
    scene.train(0)
    scene.join(0, trainer="again")
    assert [scene.view(group).spare for group in (2, 3)] == [False, False]


def test_migration_keeps_the_role() -> None:
    scene = full()
    scene.migrate(3, "other")
    assert (scene.view(3).spare, scene.view(3).worker, scene.view(3).state) == (True, "other", State.LEASED)
