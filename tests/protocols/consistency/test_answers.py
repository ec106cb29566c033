"""Fenced, duplicate and conflicting requests get the right code, and a rejected request changes nothing."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from staleflow.protocols.consistency.effects import Code, Delivered, DropWhy, ReleaseWhy
from staleflow.protocols.consistency.errors import TransitionError
from staleflow.protocols.consistency.events import Checkpointed, Consume, Deliver, Drop, Event, Occupy, Publish, Release
from staleflow.protocols.consistency.ids import BatchId, GroupId, LeaseId, Lineage, Step, TrainerTerm, Version
from tests.protocols.consistency.scenes import Scene, code


def refused(scene: Scene, event: Event) -> Code:
    """Return the code of a rejection, after checking that it changes nothing."""
    before = scene.machine.snapshot()
    scene.machine.take_dirty()
    answer = code(scene.apply(event))
    assert scene.machine.snapshot() == before
    assert scene.machine.take_dirty() == ()
    return answer


def one_step() -> Scene:
    """Return a ledger in which step 0 is sealed with groups 0 and 1; group 2 is leased, 3 pushed, 4 occupied."""
    scene = Scene(max_staleness=2, batch_size=2)
    scene.reserve(0, 1, 2, 3, 4)
    scene.finish(0, 1)
    scene.push(3)
    scene.finish(4)
    return scene


def test_the_same_push_again_is_a_duplicate_and_with_other_bytes_a_conflict() -> None:
    scene = one_step()
    for group in (0, 3, 4):
        event = scene.push_event(group)
        assert refused(scene, event) is Code.DUPLICATE
        assert refused(scene, replace(event, sha="other")) is Code.CONFLICT


def test_the_same_push_again_is_a_duplicate_until_it_is_forgotten() -> None:
    scene = one_step()
    event = scene.push_event(0)
    scene.train(0)
    assert refused(scene, event) is Code.DUPLICATE
    scene.checkpointed(1)
    assert refused(scene, event) is Code.STALE_LEASE


def test_only_the_current_lease_and_its_worker_push() -> None:
    scene = one_step()
    event = scene.push_event(2)
    assert refused(scene, replace(event, lease=LeaseId(99))) is Code.STALE_LEASE
    assert refused(scene, replace(event, worker=scene.machine.trainer)) is Code.STALE_LEASE
    assert refused(scene, replace(event, group=GroupId(77))) is Code.STALE_LEASE


def test_the_same_occupy_again_is_a_duplicate_and_under_another_lease_stale() -> None:
    scene = one_step()
    assert refused(scene, Occupy(group=GroupId(4), lease=scene.view(4).lease)) is Code.DUPLICATE
    assert refused(scene, Occupy(group=GroupId(0), lease=scene.view(0).lease)) is Code.DUPLICATE
    assert refused(scene, Occupy(group=GroupId(4), lease=LeaseId(99))) is Code.STALE_LEASE
    assert refused(scene, Occupy(group=GroupId(77), lease=LeaseId(1))) is Code.STALE_LEASE


def test_the_same_release_again_is_a_duplicate() -> None:
    scene = one_step()
    lease = scene.view(2).lease
    event = Release(group=GroupId(2), lease=lease, why=ReleaseWhy.ABORTED)
    scene.apply(event)
    assert refused(scene, event) is Code.DUPLICATE
    filtered = Release(group=GroupId(3), lease=scene.view(3).lease, why=ReleaseWhy.FILTERED)
    scene.apply(filtered)
    assert refused(scene, filtered) is Code.DUPLICATE


def test_a_release_that_comes_after_the_group_was_occupied_is_stale() -> None:
    scene = one_step()
    assert refused(scene, Release(group=GroupId(4), lease=scene.view(4).lease, why=ReleaseWhy.ABORTED)) is Code.STALE


def test_the_same_reserve_again_is_a_duplicate_and_any_other_a_conflict() -> None:
    scene = one_step()
    assert code(scene.reserve(2)) is Code.DUPLICATE
    assert code(scene.reserve(2, worker="other")) is Code.CONFLICT
    assert code(scene.reserve(3)) is Code.CONFLICT


def test_the_same_drop_again_is_a_duplicate() -> None:
    scene = one_step()
    event = Drop(group=GroupId(4), why=DropWhy.SURPLUS)
    scene.apply(event)
    assert refused(scene, event) is Code.DUPLICATE


def test_the_same_consume_again_is_a_duplicate_and_with_other_weights_a_conflict() -> None:
    scene = one_step()
    event = scene.consume_event(0)
    scene.apply(event)
    assert refused(scene, event) is Code.DUPLICATE
    assert refused(scene, replace(event, sha="other")) is Code.CONFLICT


def test_steps_are_consumed_in_order_and_only_as_they_are_sealed() -> None:
    scene = one_step()
    scene.occupy(3)
    first, second = scene.consume_event(0), scene.consume_event(1)
    assert refused(scene, second) is Code.BAD_VERSION
    assert refused(scene, replace(first, batch=BatchId(9))) is Code.BAD_VERSION
    assert refused(scene, replace(first, step=Step(1))) is Code.BAD_VERSION
    scene.apply(first)
    scene.apply(second)
    assert scene.machine.version == 2
    assert refused(scene, first) is Code.BAD_VERSION


def test_a_batch_that_was_taken_back_makes_no_version_and_the_one_sealed_instead_does() -> None:
    scene = one_step()
    void = scene.consume_event(0)
    scene.quarantine(0)
    scene.finish(2)
    assert refused(scene, void) is Code.BAD_VERSION
    scene.train(0)
    assert scene.machine.version == 1


def test_version_0_is_published_once() -> None:
    scene = Scene()
    event = Publish(trainer_term=TrainerTerm(1), sha="v0", nbytes=1)
    assert refused(scene, event) is Code.DUPLICATE
    assert refused(scene, replace(event, sha="other")) is Code.CONFLICT


def test_the_same_join_again_is_a_duplicate_and_another_process_gets_a_new_term() -> None:
    scene = Scene()
    assert code(scene.join()) is Code.DUPLICATE
    scene.join(trainer="other")
    assert scene.machine.trainer_term == 2


def test_a_trainer_that_comes_back_to_where_it_once_joined_is_no_duplicate() -> None:
    scene = one_step()
    scene.train(0)
    scene.join(0)
    assert (scene.machine.trainer_term, scene.machine.lineage) == (2, 1)
    assert code(scene.join(0)) is Code.DUPLICATE


FENCED: list[Callable[[TrainerTerm], Event]] = [
    lambda term: Publish(trainer_term=term, sha="v0", nbytes=1),
    lambda term: Deliver(batch=BatchId(1), trainer_term=term, rank=0),
    lambda term: Consume(batch=BatchId(1), step=Step(0), trainer_term=term, sha="v1", nbytes=1),
    lambda term: Checkpointed(trainer_term=term, lineage=Lineage(0), version=Version(0)),
]


@pytest.mark.parametrize("event", FENCED)
def test_a_trainer_of_another_term_is_fenced(event: Callable[[TrainerTerm], Event]) -> None:
    scene = one_step()
    scene.join(trainer="newer")
    assert refused(scene, event(TrainerTerm(1))) is Code.FENCED
    assert refused(scene, event(TrainerTerm(3))) is Code.FENCED
    assert refused(scene, event(TrainerTerm(0))) is Code.FENCED


def test_nobody_publishes_before_a_trainer_has_joined() -> None:
    scene = Scene(published=False)
    assert refused(scene, Publish(trainer_term=TrainerTerm(0), sha="v0", nbytes=1)) is Code.FENCED


def test_deliveries_are_counted_by_rank_and_a_spent_batch_is_stale() -> None:
    scene = one_step()
    first, again, other = scene.deliver(1)[0], scene.deliver(1)[0], scene.deliver(1, rank=1)[0]
    assert [e.attempt for e in (first, again, other) if isinstance(e, Delivered)] == [1, 2, 1]
    scene.train(0)
    assert code(scene.deliver(1)) is Code.STALE
    assert code(scene.deliver(9)) is Code.STALE


def test_a_checkpoint_is_kept_once_and_never_goes_back() -> None:
    scene = one_step()
    scene.train(0)
    scene.checkpointed(1)
    assert code(scene.checkpointed(1)) is Code.DUPLICATE
    assert code(scene.checkpointed(0)) is Code.BAD_VERSION
    assert code(scene.checkpointed(2)) is Code.BAD_VERSION


ILLEGAL: list[Callable[[Scene], object]] = [
    lambda scene: scene.occupy(2),
    lambda scene: scene.drop(2),
    lambda scene: scene.drop(3),
    lambda scene: scene.drop(0),
    lambda scene: scene.drop(77),
    lambda scene: scene.reserve(0),
    lambda scene: scene.reserve(-1),
    lambda scene: scene.reserve(1 << 61),
]


@pytest.mark.parametrize("act", ILLEGAL)
def test_illegal_transitions_raise_and_nothing_happens(act: Callable[[Scene], object]) -> None:
    scene = one_step()
    before = scene.machine.snapshot()
    scene.machine.take_dirty()
    with pytest.raises(TransitionError):
        act(scene)
    assert scene.machine.snapshot() == before
    assert scene.machine.take_dirty() == ()


def test_an_error_tells_the_story_of_its_group() -> None:
    scene = one_step()
    with pytest.raises(TransitionError, match=r"(?s)LEASED.*Reserved\(group=2, lease=3"):
        scene.occupy(2)
    assert len(scene.machine.story(GroupId(4))) == 3
