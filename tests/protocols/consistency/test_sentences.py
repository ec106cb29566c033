"""The machine follows the paper's running example and docs/consistency.md on admission, batches and pins."""

import pytest

from staleflow.protocols.consistency.effects import (
    Code,
    Occupied,
    Pushed,
    Rejected,
    Released,
    ReleaseWhy,
    Reserved,
    Sealed,
)
from staleflow.protocols.consistency.errors import TransitionError
from staleflow.protocols.consistency.events import Release
from staleflow.protocols.consistency.groups import State
from staleflow.protocols.consistency.ids import GroupId, LeaseId, Lineage, Step, Version, WorkerId
from staleflow.protocols.consistency.limits import Bound
from tests.protocols.consistency.scenes import Scene, code, seals


def running_example() -> Scene:
    """max_staleness 1, batches of two; step 0 is trained, version 1 is out, four groups of version 1 are leased."""
    scene = Scene(max_staleness=1, batch_size=2)
    scene.reserve(0, 1)
    scene.finish(0, 1)
    scene.train(0)
    scene.reserve(10, 11, 12, 13, version=1)
    return scene


def test_everything_reserved_at_version_1_takes_the_latest_admissible_step() -> None:
    scene = running_example()
    assert [scene.view(group).deadline for group in (10, 11, 12, 13)] == [2, 2, 2, 2]
    assert scene.machine.window() == ((1, 0, 0, 0), (2, 4, 0, 0))


def test_the_window_is_full_when_the_last_admissible_step_is() -> None:
    scene = running_example()
    assert scene.machine.room(Version(1)) == 0
    assert code(scene.reserve(14, version=1)) is Code.BUSY


def test_the_first_completions_train_in_the_earliest_step() -> None:
    scene = running_example()
    assert seals(scene.finish(12, 10)) == [(1, (12, 10))]


def test_a_step_is_pinned_by_one_straggler() -> None:
    scene = running_example()
    scene.finish(10, 11)
    scene.train(1)
    scene.reserve(20, 21, version=2)
    scene.finish(12, 20)
    assert scene.machine.sealed_batch(Step(2)) is None
    assert scene.machine.pins() == (13,)


def test_the_pinned_step_is_ready_once_the_straggler_ends() -> None:
    scene = running_example()
    scene.finish(10, 11)
    scene.train(1)
    scene.reserve(20, 21, version=2)
    scene.finish(12, 20)
    assert seals(scene.finish(13)) == [(2, (12, 13))]
    assert scene.machine.pins() == ()


def test_the_pinned_step_is_ready_once_the_straggler_is_given_up() -> None:
    scene = running_example()
    scene.finish(10, 11)
    scene.train(1)
    scene.reserve(20, 21, version=2)
    scene.finish(12, 20)
    assert seals(scene.release(13)) == [(2, (12, 20))]


def test_older_groups_train_first_and_equals_in_order_of_occupation() -> None:
    scene = Scene(max_staleness=2, batch_size=2)
    scene.reserve(0, 1)
    scene.finish(0, 1)
    scene.train(0)
    scene.reserve(20, 21, version=1)
    scene.reserve(10, version=0)
    scene.finish(21)
    assert seals(scene.finish(10)) == [(1, (10, 21))]


def test_a_starved_step_is_pinned_by_nobody() -> None:
    scene = running_example()
    scene.finish(10)
    assert scene.machine.starved()
    assert scene.machine.pins() == ()


def test_pins_are_chosen_by_deadline_and_then_newest_lease_first() -> None:
    scene = Scene(max_staleness=1, batch_size=2)
    scene.reserve(0, 1, 2, 3)
    scene.finish(0, 1)
    scene.train(0)
    scene.reserve(10, 11, version=1)
    scene.finish(10, 11)
    assert scene.machine.pins() == (3, 2)


def test_a_pushed_group_pins_too() -> None:
    scene = running_example()
    scene.finish(10, 11)
    scene.train(1)
    scene.reserve(20, 21, version=2)
    scene.push(13)
    scene.finish(12, 20)
    assert scene.machine.pins() == (13,)


def test_a_group_of_every_published_version_may_start_while_its_deadline_has_room() -> None:
    scene = Scene(max_staleness=2, batch_size=1)
    scene.reserve(0)
    scene.finish(0)
    scene.train(0)
    assert [scene.machine.room(Version(version)) for version in (0, 1, 2)] == [2, 3, 0]
    assert code(scene.reserve(5, version=2)) is Code.BAD_VERSION
    assert code(scene.reserve(5, version=-1)) is Code.BAD_VERSION


def test_nothing_starts_before_version_0_is_out() -> None:
    scene = Scene(published=False)
    assert scene.machine.room(Version(0)) == 0
    assert code(scene.reserve(0)) is Code.BAD_VERSION


def test_room_at_version_0_is_not_taken_for_no_version() -> None:
    scene = Scene(max_staleness=0, batch_size=1)
    assert scene.machine.room(Version(0)) == 1
    scene.reserve(0)
    assert scene.machine.room(Version(0)) == 0


def test_max_staleness_0_is_truly_on_policy() -> None:
    scene = Scene(max_staleness=0, batch_size=2)
    scene.reserve(0, 1)
    assert code(scene.reserve(2)) is Code.BUSY
    assert seals(scene.finish(0, 1)) == [(0, (0, 1))]
    assert scene.machine.room(Version(0)) == 0, "step 0 trains: a group of version 0 has no step left"
    assert code(scene.reserve(2)) is Code.BUSY
    scene.train(0)
    assert scene.machine.room(Version(0)) == 0
    assert scene.machine.room(Version(1)) == 2


def test_sealing_runs_one_step_ahead_of_training_and_no_further() -> None:
    scene = Scene(max_staleness=3, batch_size=1)
    scene.reserve(0, 1, 2)
    assert seals(scene.finish(0)) == [(0, (0,))]
    assert seals(scene.finish(1)) == [(1, (1,))]
    assert seals(scene.finish(2)) == []
    assert seals(scene.train(0)) == [(2, (2,))]


def test_nothing_is_sealed_before_a_trainer_has_joined_and_all_that_is_ready_when_it_has() -> None:
    scene = Scene(max_staleness=1, batch_size=1)
    scene.reserve(0)
    stored = scene.machine.globals_row()
    assert stored[6] == 1, "the trainer term"
    scene.machine = type(scene.machine).restore(
        scene.limits, (*stored[:6], 0, "", *stored[8:]), scene.machine.rows().items(), 0
    )
    assert seals(scene.finish(0)) == []
    assert seals(scene.join()) == [(0, (0,))]


def test_a_batch_says_which_groups_in_which_order() -> None:
    scene = Scene(max_staleness=0, batch_size=1)
    (reserved,) = scene.reserve(7)
    assert reserved == Reserved(
        group=GroupId(7),
        lease=LeaseId(1),
        worker=WorkerId("w"),
        lineage=Lineage(0),
        version=Version(0),
        deadline=Step(0),
        spare=False,
    )
    (pushed,) = scene.push(7)
    assert isinstance(pushed, Pushed)
    occupied, sealed = scene.occupy(7)
    assert occupied == Occupied(group=GroupId(7))
    assert isinstance(sealed, Sealed)
    assert (sealed.batch, sealed.step, sealed.tokens, sealed.masked_tokens) == (1, 0, 10, 0)
    assert sealed.members[0].sha == "sha-7-1"
    assert scene.machine.sealed_batch(Step(0)) == sealed


def test_a_filtered_group_frees_its_slot_and_its_id_retires() -> None:
    scene = Scene(max_staleness=0, batch_size=1)
    scene.reserve(0)
    scene.push(0)
    (released,) = scene.release(0, ReleaseWhy.FILTERED)
    assert isinstance(released, Released)
    assert (released.why, released.tokens, released.pushed) == (ReleaseWhy.FILTERED, 10, True)
    assert scene.machine.room(Version(0)) == 1
    assert scene.machine.retired(GroupId(0))
    assert scene.machine.group(GroupId(0)) is None
    with pytest.raises(TransitionError, match="retired"):
        scene.reserve(0)


def test_a_group_that_is_given_up_for_good_is_never_leased_again() -> None:
    scene = Scene(max_staleness=0, batch_size=1)
    scene.reserve(0, 1)
    given_up = Release(group=GroupId(0), lease=scene.view(0).lease, why=ReleaseWhy.ABORTED, retire=True)
    (released,) = scene.apply(given_up)
    assert isinstance(released, Released)
    assert scene.machine.retired(GroupId(0))
    assert scene.machine.group(GroupId(0)) is None
    with pytest.raises(TransitionError, match="retired"):
        scene.reserve(0)
    (again,) = scene.apply(given_up)
    assert isinstance(again, Rejected)
    assert again.code is Code.DUPLICATE


def test_an_aborted_group_may_be_leased_again_under_a_new_number() -> None:
    scene = Scene(max_staleness=0, batch_size=1)
    scene.reserve(0)
    scene.release(0)
    assert scene.view(0).state is State.RELEASED
    scene.reserve(0, worker="other")
    assert (scene.view(0).lease, scene.view(0).worker) == (2, "other")
    late = Release(group=GroupId(0), lease=LeaseId(1), why=ReleaseWhy.ABORTED)
    assert code(scene.apply(late)) is Code.STALE_LEASE


def test_the_token_bound_masks_old_tokens_instead_of_pinning() -> None:
    scene = Scene(max_staleness=1, batch_size=1, bound=Bound.TOKEN)
    scene.reserve(9)
    for step in range(3):
        scene.reserve(step, version=step)
        scene.finish(step)
        scene.train(step)
    assert scene.machine.pins() == ()
    scene.push(9, (0, 5), (1, 7), (2, 11))
    _, sealed = scene.occupy(9)
    assert isinstance(sealed, Sealed)
    assert (sealed.step, sealed.tokens, sealed.masked_tokens) == (3, 23, 5 + 7)


def test_the_token_bound_admits_by_volume_and_trains_the_longest_occupied() -> None:
    scene = Scene(max_staleness=1, batch_size=2, bound=Bound.TOKEN)
    scene.reserve(0, 1, 2, 3)
    assert code(scene.reserve(4)) is Code.BUSY
    assert scene.view(0).deadline is None
    assert seals(scene.finish(3, 1)) == [(0, (3, 1))]
    assert seals(scene.finish(2, 0)) == [(1, (2, 0))]


def test_too_few_trainable_tokens_and_the_group_is_dropped_when_it_is_occupied() -> None:
    scene = Scene(max_staleness=0, batch_size=1, bound=Bound.TOKEN, min_trainable=0.5)
    scene.reserve(0)
    scene.finish(0)
    scene.train(0)
    scene.reserve(1, version=0)
    scene.push(1, (0, 6), (1, 5))
    assert [type(effect).__name__ for effect in scene.occupy(1)] == ["Occupied", "Dropped"]
    scene.reserve(2, version=0)
    scene.push(2, (0, 5), (1, 5))
    assert seals(scene.occupy(2)) == [(1, (2,))]


@pytest.mark.parametrize("restart", [False, True])
def test_a_group_that_grows_too_old_while_it_waits_is_dropped_when_the_step_rises(restart: bool) -> None:
    scene = Scene(max_staleness=3, batch_size=1, bound=Bound.TOKEN, min_trainable=0.5)
    scene.reserve(0, 1, 2)
    scene.finish(0, 1, 2)
    scene.train(0)
    scene.reserve(3, 4)
    scene.finish(3, 4)
    assert (scene.machine.version, scene.machine.next_step) == (1, 3)
    if restart:
        scene.machine = scene.restart()
    assert [type(effect).__name__ for effect in scene.train(1)] == ["Consumed", "Published", "Sealed", "Dropped"]
    assert scene.machine.retired(GroupId(4))
