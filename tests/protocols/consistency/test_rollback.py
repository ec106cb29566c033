"""Trainers resume from the newest version or an older one, and a batch with a corrupt payload is taken back."""

import pytest

from staleflow.protocols.consistency.effects import (
    CheckpointKept,
    Code,
    Dropped,
    DropWhy,
    Joined,
    Released,
    ReleaseWhy,
    RolledBack,
    Sealed,
    Unsealed,
)
from staleflow.protocols.consistency.events import Push
from staleflow.protocols.consistency.groups import State
from staleflow.protocols.consistency.ids import GroupId, LeaseId, Lineage, Segment, Step, Version, WorkerId
from staleflow.protocols.consistency.ledger import STEP_ROWS
from staleflow.protocols.consistency.limits import Bound
from tests.protocols.consistency.scenes import Scene, code, groups, seals


def trained(steps: int, max_staleness: int = 2, batch_size: int = 2, bound: Bound = Bound.TRAJECTORY) -> Scene:
    """Return a ledger in which each step k trained groups 10 k and 10 k + 1, written by version k."""
    scene = Scene(max_staleness=max_staleness, batch_size=batch_size, bound=bound)
    for step in range(steps):
        ids = range(10 * step, 10 * step + batch_size)
        scene.reserve(*ids, version=step)
        scene.finish(*ids)
        scene.train(step)
    return scene


def test_a_trainer_that_comes_back_at_the_newest_version_is_served_the_same_batch() -> None:
    scene = trained(1)
    scene.reserve(20, 21, version=1)
    scene.finish(20, 21)
    before = scene.batch(1)
    assert [type(effect) for effect in scene.join(1, trainer="again")] == [Joined]
    assert scene.batch(1) == before
    assert scene.machine.trainer_term == 2


def test_rollback_seals_the_batch_again_at_once_same_members_order_and_digest_under_a_new_id() -> None:
    scene = Scene(max_staleness=1, batch_size=2)
    scene.reserve(0, 1, 2, 3)
    scene.finish(3, 1)
    first = scene.batch(0)
    scene.train(0)
    joined, rolled, sealed = scene.join(0, trainer="again")
    assert isinstance(joined, Joined)
    assert rolled == RolledBack(
        lineage=Lineage(1), from_lineage=Lineage(0), to_version=Version(0), trainer_term=joined.trainer_term
    )
    assert isinstance(sealed, Sealed)
    assert (sealed.members, sealed.digest, sealed.step) == (first.members, first.digest, first.step)
    assert (sealed.batch, sealed.lineage) == (2, 1)


def test_rollback_gives_up_what_an_abandoned_version_wrote_and_keeps_the_rest() -> None:
    scene = trained(2)
    scene.reserve(30, version=1)
    scene.push(30, (1, 3), (2, 4))
    scene.reserve(31, 32, version=2)
    scene.finish(31)
    scene.reserve(33, version=1)
    done = scene.join(1, trainer="again")
    assert [(e.group, e.why) for e in done if isinstance(e, Released)] == [
        (30, ReleaseWhy.ROLLBACK),
        (32, ReleaseWhy.ROLLBACK),
    ]
    assert [(e.group, e.why) for e in done if isinstance(e, Dropped)] == [(31, DropWhy.ROLLBACK)]
    assert seals(done) == [(1, (10, 11))]
    assert scene.view(33).state is State.LEASED
    assert (scene.machine.lineage, scene.machine.version, scene.machine.next_step) == (1, 1, 2)


def test_a_late_push_from_an_abandoned_version_is_stale() -> None:
    scene = trained(2)
    scene.reserve(33, version=1)
    late = scene.push_event(33, (1, 3), (2, 4))
    scene.join(1, trainer="again")
    assert code(scene.apply(late)) is Code.STALE
    scene.train(1)
    assert code(scene.apply(late)) is Code.STALE, "version 2 exists again, but in another lineage"
    assert seals(scene.finish(33)) == []


def test_groups_of_later_batches_return_in_their_old_order() -> None:
    scene = Scene(max_staleness=3, batch_size=1)
    scene.reserve(0, 1, 2, 3)
    scene.finish(3, 1, 0, 2)
    scene.train(0, 1)
    done = scene.join(0, trainer="again")
    assert seals(done) == [(0, (3,)), (1, (1,))]
    assert seals(scene.train(0)) == [(2, (0,))]
    assert seals(scene.train(1)) == [(3, (2,))]


def test_a_rollback_only_goes_to_a_surviving_published_version_since_the_oldest_checkpoint() -> None:
    scene = trained(3)
    scene.checkpointed(1)
    for lineage, version in ((0, 0), (0, 4), (1, 2), (-1, 2), (0, -1)):
        assert code(scene.join(version, lineage, trainer="again")) is Code.BAD_VERSION
    scene.join(1, trainer="again")
    scene.train(1)
    assert code(scene.join(2, lineage=0, trainer="third")) is Code.BAD_VERSION
    assert scene.machine.trainer_term == 2
    assert [type(effect) for effect in scene.join(2, lineage=1, trainer="third")] == [Joined]


def test_a_second_rollback_may_go_below_the_first() -> None:
    scene = trained(3)
    scene.join(2, trainer="b")
    scene.train(2)
    assert scene.machine.lineage_of(Version(3)) == 1
    done = scene.join(1, trainer="c")
    assert seals(done)[0] == (1, (10, 11))
    assert [scene.machine.lineage_of(Version(v)) for v in (0, 1, 2)] == [0, 0, 2]
    assert not scene.machine.survives(Lineage(1), Version(2)), "not published"
    scene.train(1)
    assert scene.machine.survives(Lineage(2), Version(2))
    assert not scene.machine.survives(Lineage(0), Version(2))


def test_consumed_payload_is_kept_until_no_checkpoint_needs_it_and_then_its_ids_never_come_back() -> None:
    scene = trained(2)
    assert scene.machine.must_keep(GroupId(0))
    (kept,) = scene.checkpointed(1)
    assert isinstance(kept, CheckpointKept)
    assert [scene.machine.must_keep(GroupId(group)) for group in (0, 10)] == [False, True]
    assert scene.machine.retired(GroupId(0))
    assert scene.machine.state_counts()["consumed"] == 4


def test_everything_since_the_oldest_kept_checkpoint_stays_and_a_rollback_to_it_seals_its_batch_again() -> None:
    scene = trained(2)
    batch = scene.machine.row(STEP_ROWS + 1)
    scene.checkpointed(1, keep=2)
    scene.checkpointed(2, keep=2)
    scene.reserve(20, 21, version=2)
    scene.finish(20, 21)
    scene.train(2)
    assert scene.checkpointed(3, keep=3) == (
        CheckpointKept(lineage=Lineage(0), version=Version(1), trainer_term=scene.machine.trainer_term),
    ), "the oldest that is left, not the newest"
    assert [scene.machine.must_keep(GroupId(group)) for group in (0, 10, 20)] == [False, True, True]
    assert code(scene.join(0, trainer="again")) is Code.BAD_VERSION
    done = scene.join(1, trainer="again")
    (sealed,) = [effect for effect in done if isinstance(effect, Sealed)]
    assert batch is not None
    assert sealed.digest in batch
    assert groups(sealed) == (10, 11)


def test_a_rollback_forgets_the_checkpoints_after_it() -> None:
    scene = trained(3)
    scene.checkpointed(1, keep=3)
    scene.checkpointed(3, keep=2)
    assert scene.machine.versions_in_use() == ((0, 3),)
    scene.join(1, trainer="again")
    assert (scene.machine.checkpoint, scene.machine.oldest_checkpoint) == ((0, 1), (0, 1))
    assert scene.machine.versions_in_use() == ((0, 1),)
    scene.train(1)
    scene.checkpointed(2, lineage=1, keep=2)
    assert (scene.machine.checkpoint, scene.machine.oldest_checkpoint) == ((1, 2), (0, 1))
    assert scene.machine.must_keep(GroupId(10))


def test_a_trainer_that_needs_room_keeps_its_newest_checkpoint_alone() -> None:
    scene = trained(2)
    scene.checkpointed(2, keep=2)
    assert scene.machine.must_keep(GroupId(0)), "version 0 is the first checkpoint"
    (kept,) = scene.checkpointed(2, keep=1)
    assert isinstance(kept, CheckpointKept)
    assert kept.version == 2
    assert not any(scene.machine.must_keep(GroupId(group)) for group in (0, 10))
    assert code(scene.checkpointed(2, keep=2)) is Code.DUPLICATE, "what is forgotten does not come back"
    assert code(scene.checkpointed(2, keep=0)) is Code.MALFORMED


def test_no_number_of_checkpoints_makes_the_ledger_grow() -> None:
    scene = trained(0)
    for step in range(20):
        scene.reserve(10 * step, 10 * step + 1, version=step)
        scene.finish(10 * step, 10 * step + 1)
        scene.train(step)
        scene.checkpointed(step + 1, keep=10**9)
    assert (scene.machine.oldest_checkpoint, scene.machine.checkpoint) == ((0, 5), (0, 20))


def test_a_checkpoint_needs_no_older_batch_and_forgets_a_few_groups_at_a_time() -> None:
    scene = trained(3, batch_size=6)
    scene.checkpointed(2)
    every = [*range(6), *range(10, 16), *range(20, 26)]
    assert [scene.machine.must_keep(GroupId(group)) for group in every] == [False] * 12 + [True] * 6
    retired: list[int] = []
    for _ in range(5):
        retired.append(sum(scene.machine.retired(GroupId(group)) for group in every))
        scene.machine = scene.restart()
        scene.machine.check()
        scene.at(1)
    assert retired == [4, 6, 10, 12, 12]
    assert scene.machine.state_counts()["consumed"] == 18


def test_as_many_groups_are_forgotten_as_are_occupied() -> None:
    scene = trained(1, batch_size=6)
    scene.checkpointed(1)
    scene.reserve(10, version=1)
    scene.finish(10)
    assert all(scene.machine.retired(GroupId(group)) for group in range(6))


def test_a_rollback_finds_everything_while_an_older_batch_is_being_forgotten() -> None:
    scene = trained(2, batch_size=6)
    before = scene.machine.row(STEP_ROWS + 1)
    scene.checkpointed(1)
    scene.machine = scene.restart()
    (_, _, sealed) = scene.join(1, trainer="again")
    assert isinstance(sealed, Sealed)
    assert before is not None
    assert sealed.digest in before
    assert groups(sealed) == tuple(range(10, 16))


def test_the_versions_to_keep_are_the_newest_checkpoint_the_newest_and_those_of_leases() -> None:
    scene = trained(4)
    scene.checkpointed(1)
    scene.reserve(50, version=2)
    assert scene.machine.versions_in_use() == ((0, 1), (0, 2), (0, 4))
    scene.checkpointed(3, keep=2)
    assert scene.machine.versions_in_use() == ((0, 2), (0, 3), (0, 4)), "the older checkpoint is published again"


def test_a_corrupt_member_unseals_its_batch_and_any_later_one_and_leaves() -> None:
    scene = Scene(max_staleness=2, batch_size=2)
    scene.reserve(0, 1, 2, 3, 4)
    scene.finish(0, 1, 2, 3, 4)
    done = scene.quarantine(1)
    assert done[:3] == (
        Unsealed(batch=scene.batch(0).batch - 1, why=DropWhy.QUARANTINE),  # type: ignore[arg-type]
        Unsealed(batch=scene.batch(0).batch - 2, why=DropWhy.QUARANTINE),  # type: ignore[arg-type]
        Dropped(group=GroupId(1), tokens=10, why=DropWhy.QUARANTINE),
    )
    assert seals(done) == [(0, (0, 2)), (1, (3, 4))]
    assert groups(scene.batch(0)) == (0, 2)


def test_a_corrupt_group_outside_a_batch_leaves_alone() -> None:
    scene = Scene(max_staleness=2, batch_size=3)
    scene.reserve(0, 1, 2)
    scene.finish(0)
    scene.push(1)
    assert [type(effect) for effect in scene.quarantine(0)] == [Dropped]
    assert [type(effect) for effect in scene.quarantine(1)] == [Released]
    assert code(scene.quarantine(2)) is Code.STALE
    assert code(scene.quarantine(0)) is Code.DUPLICATE


def test_after_a_rollback_the_token_bound_waits_until_the_volume_is_used_up() -> None:
    scene = Scene(max_staleness=0, batch_size=1, bound=Bound.TOKEN, max_spares=1)
    for step in range(3):
        scene.reserve(step, version=step)
        scene.push(step, (step, 10))
        scene.occupy(step)
        scene.train(step)
    scene.reserve(3, version=0)
    scene.join(2, trainer="again")
    assert scene.machine.room(Version(2)) == 0
    assert code(scene.reserve(4, version=2)) is Code.BUSY
    assert code(scene.migrate(3, "b")) is Code.BUSY


@pytest.mark.parametrize("version", [-1, 3])
def test_a_segment_outside_what_the_lease_allows_is_a_bad_version(version: int) -> None:
    scene = trained(2)
    scene.reserve(40, version=1)
    event = Push(
        group=GroupId(40),
        lease=LeaseId(scene.view(40).lease),
        worker=WorkerId("w"),
        shard=0,
        sha="x",
        nbytes=1,
        truncated=False,
        segments=(Segment(Lineage(0), Version(version), 1),),
        sequence_tokens=1,
    )
    assert code(scene.apply(event)) is Code.BAD_VERSION
    assert code(scene.push(40, (0, 1))) is Code.BAD_VERSION, "older than the lease"
    assert scene.view(40).state is State.LEASED
    assert scene.machine.next_step == Step(2)
