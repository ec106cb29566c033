"""The name of a process is not to be taken: not of another role, nor with another key while its owner is there."""

from pathlib import Path

from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.wire.messages import Attached, Commands, Refusal
from staleflow.runtime.roles import Role
from tests.servers.scheduler.asked import Asked


def refused(answer: object) -> Code | None:
    return answer.code if isinstance(answer, Refusal) else None


def test_a_name_belongs_to_its_role(tmp_path: Path) -> None:
    run = Asked(tmp_path)
    run.cast("a")
    held = run.leases("a")
    for name in ("name-of-a", "trainer", "trajectories-0", "parameters"):
        assert refused(run.attach("evil", name, "monitor", Role.MONITOR)) is Code.DENIED
    assert run.leases("a") == held
    assert isinstance(run.report("a"), Commands | None)
    run.stop()
    run.start()
    answer = run.attach("b", "b", "rollout", Role.ROLLOUT, capacity=1)
    assert isinstance(answer, Attached)
    assert all(answer.shards)
    assert answer.parameters
    assert refused(run.attach("evil", "trajectories-0", "monitor", Role.MONITOR)) is Code.DENIED
    run.stop()


def test_a_name_belongs_to_its_key_while_its_owner_is_there(tmp_path: Path) -> None:
    run = Asked(tmp_path)
    run.cast("a")
    held = run.leases("a")
    other = ("evil", "name-of-a", "rollout", Role.ROLLOUT)
    assert refused(run.attach(*other, key="key-of-evil", capacity=4)) is Code.BUSY
    assert run.leases("a") == held
    assert isinstance(run.attach("a.again", "name-of-a", "rollout", Role.ROLLOUT, key="key-of-a", capacity=4), Attached)
    run.service.on_gone("a.again")
    assert isinstance(run.attach(*other, key="key-of-evil", capacity=4), Attached)
    run.stop()


def test_a_name_can_be_printed(tmp_path: Path) -> None:
    run = Asked(tmp_path)
    for letter in ("\x1b", "\x07", "\n", "\x9b", "\x7f", "\u202e", "\u2028"):
        for worker, name in (("a", f"a{letter}]0;title"), (f"a{letter}", "a")):
            answer = run.attach(worker, name, "rollout", Role.ROLLOUT, capacity=1)
            assert isinstance(answer, Refusal)
            assert answer.code is Code.MALFORMED
            assert answer.detail.isprintable()
    assert isinstance(run.attach("b", "Läufer 日本", "rollout", Role.ROLLOUT, capacity=1), Attached)
    run.stop()
