"""A group that pins the awaited step is handled as ``on_overdue`` configures: wait, truncate, retry or drop."""

import pytest

from staleflow.protocols.consistency.effects import Released, ReleaseWhy, Reserved, Truncate
from staleflow.protocols.consistency.events import Renew
from staleflow.protocols.consistency.groups import State
from staleflow.protocols.consistency.ids import GroupId, LeaseId, Step, Version, WorkerId
from staleflow.protocols.consistency.limits import Bound, OnOverdue
from tests.protocols.consistency.scenes import Scene, seals


def stalled(on_overdue: OnOverdue) -> Scene:
    """Step 1 is blocked: group 1 of version 0 is the straggler; of 2 and 3 of version 1, only 3 is unfinished."""
    scene = Scene(max_staleness=1, batch_size=2, on_overdue=on_overdue)
    scene.reserve(0, 1, 5)
    scene.finish(0, 5)
    scene.train(0)
    scene.reserve(2, 3, 4, version=1)
    scene.finish(2)
    scene.at(1)
    scene.renew("w")
    return scene


def test_wait_stalls_until_the_straggler_ends() -> None:
    scene = stalled(OnOverdue.WAIT)
    assert seals(scene.finish(3)) == []
    assert scene.machine.pins() == (1,)
    assert seals(scene.finish(1)) == [(1, (1, 2))]


def test_truncate_tells_the_straggler_once_to_finish_with_what_it_has() -> None:
    scene = stalled(OnOverdue.TRUNCATE)
    assert scene.finish(3)[1:] == (Truncate(group=GroupId(1), lease=LeaseId(2), worker=WorkerId("w")),)
    scene.push(4)
    assert not [effect for effect in scene.occupy(4) if isinstance(effect, Truncate)]
    assert seals(scene.apply(scene.push_event(1, (0, 3), truncated=True))) == []
    assert seals(scene.occupy(1)) == [(1, (1, 2)), (2, (3, 4))]


def test_truncate_tells_only_the_next_when_another_pins_as_well() -> None:
    scene = stalled(OnOverdue.TRUNCATE)
    scene.release(4)
    scene.finish(3)
    reserved, truncate = scene.reserve(9, version=0)
    assert isinstance(reserved, Reserved)
    assert truncate == Truncate(group=GroupId(9), lease=reserved.lease, worker=WorkerId("w"))


def test_truncate_is_told_again_after_a_restart() -> None:
    scene = stalled(OnOverdue.TRUNCATE)
    scene.finish(3)
    scene.machine = scene.restart()
    assert scene.at(1) == (Truncate(group=GroupId(1), lease=LeaseId(2), worker=WorkerId("w")),)
    assert scene.at(2) == (), "once"


def test_truncate_is_told_again_to_where_the_straggler_has_moved() -> None:
    scene = stalled(OnOverdue.TRUNCATE)
    scene.finish(3)
    released, reserved, truncate = scene.migrate(1, to="other")
    assert isinstance(released, Released)
    assert isinstance(reserved, Reserved)
    assert truncate == Truncate(group=GroupId(1), lease=reserved.lease, worker=WorkerId("other"))


def test_retry_leases_the_straggler_anew_at_the_newest_version_in_one_transaction() -> None:
    scene = stalled(OnOverdue.RETRY)
    _, released, reserved, *rest = scene.finish(3)
    assert isinstance(released, Released)
    assert isinstance(reserved, Reserved)
    assert (released.group, released.why) == (1, ReleaseWhy.OVERDUE)
    assert (reserved.group, reserved.version, reserved.deadline, reserved.worker) == (1, 1, 2, "w")
    assert seals(tuple(rest)) == [(1, (2, 3))]


def test_retry_keeps_no_lease_of_the_dead_alive() -> None:
    scene = Scene(max_staleness=1, batch_size=1, on_overdue=OnOverdue.RETRY, lease_ms=100)
    scene.reserve(0, worker="dead")
    newest = 0
    for group in range(1, 8):
        scene.now_ms += 30
        scene.apply(Renew(worker=WorkerId("w")))
        if scene.machine.room(Version(newest)):
            scene.reserve(group, version=newest)
            scene.finish(group)
        while scene.machine.sealed_batch(Step(newest)) is not None:
            scene.train(newest)
            newest += 1
    assert newest >= 3
    assert scene.view(0).state is State.RELEASED
    assert scene.view(0).lease == 1, "nor does a lease count as a word of its holder"


def test_what_retry_takes_from_a_stage_goes_to_nobody_who_left() -> None:
    scene = Scene(max_staleness=1, batch_size=2, on_overdue=OnOverdue.RETRY)
    scene.reserve(0)
    scene.reserve(1, worker="gone")
    scene.reserve(5)
    scene.finish(0, 5)
    scene.train(0)
    scene.reserve(2, 3, 4, version=1)
    scene.push(1)
    scene.detach("gone")
    scene.finish(2)
    _, released, *rest = scene.finish(3)
    assert isinstance(released, Released)
    assert (released.group, released.why) == (1, ReleaseWhy.OVERDUE)
    assert seals(tuple(rest)) == [(1, (2, 3))]
    assert not [effect for effect in rest if isinstance(effect, Reserved)]


def test_retry_waits_for_a_straggler_that_is_of_the_newest_version_already() -> None:
    scene = Scene(max_staleness=0, batch_size=2, on_overdue=OnOverdue.RETRY, max_spares=1)
    scene.reserve(0, 1)
    assert [type(effect).__name__ for effect in scene.finish(0)] == ["Occupied"]
    assert scene.view(1).lease == 2


def test_drop_abandons_the_straggler_and_the_step_goes_on() -> None:
    scene = stalled(OnOverdue.DROP)
    _, released, *rest = scene.finish(3)
    assert isinstance(released, Released)
    assert (released.group, released.why) == (1, ReleaseWhy.OVERDUE)
    assert seals(tuple(rest)) == [(1, (2, 3))]
    assert scene.machine.room(Version(1)) == 1, "another prompt takes the slot"


@pytest.mark.parametrize("on_overdue", [OnOverdue.TRUNCATE, OnOverdue.RETRY, OnOverdue.DROP])
def test_nothing_is_done_about_a_straggler_while_the_trainer_still_trains(on_overdue: OnOverdue) -> None:
    scene = Scene(max_staleness=2, batch_size=1, on_overdue=on_overdue)
    scene.reserve(0, 1, 2)
    scene.finish(0, 2)
    scene.train(0)
    scene.at(1)
    scene.renew("w")
    scene.reserve(3, version=1)
    assert [type(effect).__name__ for effect in scene.finish(3)] == ["Occupied"]
    assert scene.machine.pins() == (1,), "step 2 is pinned while step 1 trains"
    assert scene.view(1).lease == 2
    acted = {
        OnOverdue.TRUNCATE: ["Truncate"],
        OnOverdue.RETRY: ["Released", "Reserved", "Sealed"],
        OnOverdue.DROP: ["Released", "Sealed"],
    }
    assert [type(effect).__name__ for effect in scene.train(1)] == ["Consumed", "Published", *acted[on_overdue]]


def test_a_pushed_straggler_is_retried_as_well() -> None:
    scene = stalled(OnOverdue.RETRY)
    scene.push(1)
    _, released, _, *rest = scene.finish(3)
    assert isinstance(released, Released)
    assert (released.group, released.pushed, released.tokens) == (1, True, 10)
    assert seals(tuple(rest)) == [(1, (2, 3))]


def test_the_token_bound_has_nobody_to_be_overdue() -> None:
    scene = Scene(max_staleness=1, batch_size=1, bound=Bound.TOKEN, on_overdue=OnOverdue.DROP)
    scene.reserve(0, 1)
    assert seals(scene.finish(1)) == [(0, (1,))]
    scene.train(0)
    scene.reserve(2, version=1)
    assert seals(scene.finish(2)) == [(1, (2,))]
    assert scene.view(0).step is None
    assert scene.machine.next_step == Step(2)
