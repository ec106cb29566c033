"""Leases expire by holder, are renewed and migrate, and a late worker gets a code that names its situation."""

from dataclasses import replace

from staleflow.protocols.consistency.effects import Code, Released, ReleaseWhy, Reserved
from staleflow.protocols.consistency.groups import State
from staleflow.protocols.consistency.ids import GroupId, LeaseId, Version, WorkerId
from tests.protocols.consistency.scenes import Scene, code


def expired(scene: Scene, now_ms: int) -> list[int]:
    done = scene.at(now_ms)
    assert all(isinstance(effect, Released) and effect.why is ReleaseWhy.EXPIRED for effect in done)
    return [effect.group for effect in done if isinstance(effect, Released)]


def test_an_expired_lease_frees_its_slot() -> None:
    scene = Scene(max_staleness=0, batch_size=1, lease_ms=100)
    scene.reserve(1)
    assert scene.at(99) == ()
    assert scene.at(100) == (
        Released(
            group=GroupId(1),
            lease=LeaseId(1),
            worker=WorkerId("w"),
            tokens=0,
            why=ReleaseWhy.EXPIRED,
            pushed=False,
        ),
    )
    assert scene.machine.room(Version(0)) == 1


def test_one_heartbeat_renews_all_leases_of_its_holder_and_of_no_other() -> None:
    scene = Scene(batch_size=4, lease_ms=100)
    scene.reserve(0, 1, worker="a")
    scene.reserve(2, worker="b")
    scene.now_ms = 60
    assert scene.renew("a") == ()
    assert expired(scene, 100) == [2]
    assert expired(scene, 159) == []
    assert expired(scene, 160) == [0, 1]


def test_a_new_lease_does_not_renew_the_older_ones_of_a_silent_holder() -> None:
    scene = Scene(batch_size=4, lease_ms=100)
    scene.reserve(0)
    scene.now_ms = 50
    scene.reserve(1)
    assert expired(scene, 100) == [0]
    assert expired(scene, 149) == []
    assert expired(scene, 150) == [1]


def test_a_pushed_group_has_no_lease_left_to_expire() -> None:
    scene = Scene(lease_ms=100)
    scene.reserve(0)
    scene.push(0)
    assert expired(scene, 1000) == []
    assert scene.machine.leases_of(WorkerId("w")) == ()


def test_a_late_push_is_rejected_and_the_new_lease_stands() -> None:
    scene = Scene(lease_ms=100)
    scene.reserve(0, worker="a")
    late = scene.push_event(0)
    scene.at(100)
    assert code(scene.apply(late)) is Code.STALE_LEASE
    scene.reserve(0, worker="b")
    assert code(scene.apply(late)) is Code.STALE_LEASE
    assert (scene.view(0).state, scene.view(0).worker) == (State.LEASED, "b")


def test_a_detached_worker_loses_its_leases_at_once_and_keeps_what_it_pushed() -> None:
    scene = Scene(batch_size=4)
    scene.reserve(0, 1, 2, worker="a")
    scene.push(1)
    done = scene.detach("a")
    assert [effect.group for effect in done if isinstance(effect, Released)] == [0, 2]
    assert scene.view(1).state is State.PUSHED
    assert scene.detach("a") == ()


def test_leases_of_a_worker_are_listed_oldest_first() -> None:
    scene = Scene(batch_size=4)
    scene.reserve(3, 1, worker="a")
    scene.reserve(2, worker="b")
    assert scene.machine.leases_of(WorkerId("a")) == ((3, 1), (1, 2))
    assert scene.machine.leases_of(WorkerId("nobody")) == ()


def test_migration_is_one_transaction_at_the_same_version_under_a_new_lease() -> None:
    scene = Scene(max_staleness=0, batch_size=1)
    scene.reserve(0, worker="a")
    released, reserved = scene.migrate(0, "b")
    assert isinstance(released, Released)
    assert isinstance(reserved, Reserved)
    assert (released.lease, released.worker, released.why) == (1, "a", ReleaseWhy.ABORTED)
    assert (reserved.lease, reserved.worker, reserved.version, reserved.deadline) == (2, "b", 0, 0)
    assert scene.machine.leases_of(WorkerId("a")) == ()


def test_what_was_written_before_a_migration_is_pushed_by_the_new_lease_alone() -> None:
    """Version 0 wrote three tokens at a, version 1 continues at b: the group is of version 0 at both."""
    scene = Scene(max_staleness=1, batch_size=1)
    scene.reserve(0, 1, worker="a")
    before = scene.push_event(0, (0, 3))
    scene.finish(1)
    scene.train(0)
    scene.migrate(0, "b")
    assert code(scene.apply(before)) is Code.STALE_LEASE
    assert code(scene.apply(replace(before, worker=WorkerId("b")))) is Code.STALE_LEASE
    assert [type(effect).__name__ for effect in scene.push(0, (0, 3), (1, 4))] == ["Pushed"]
    assert code(scene.apply(before)) is Code.STALE_LEASE
    assert (scene.view(0).version, scene.view(0).deadline, scene.view(0).tokens) == (0, 1, 7)


def test_migration_of_what_is_pushed_is_refused() -> None:
    scene = Scene()
    scene.reserve(0)
    scene.push(0)
    assert code(scene.migrate(0, "b")) is Code.STALE_LEASE


def test_a_heartbeat_of_an_unknown_worker_is_nothing() -> None:
    scene = Scene()
    assert scene.renew("nobody") == ()


def test_a_restart_grants_every_lease_a_full_term() -> None:
    scene = Scene(lease_ms=100)
    scene.reserve(0)
    scene.now_ms = 99
    scene.machine = scene.restart()
    assert expired(scene, 198) == []
    assert expired(scene, 199) == [0]
