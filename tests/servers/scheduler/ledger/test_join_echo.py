"""A late duplicate of a join whose answer was lost neither rolls back nor fences a trainer."""

from pathlib import Path

import pytest

from staleflow.net.permissions import Role
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.consistency.ids import Step
from staleflow.protocols.wire.messages import JoinReply, Refusal, RegisterOccupy
from tests.servers.scheduler.asked import Asked


@pytest.mark.parametrize("restart", [False, True])
def test_a_late_echo_of_a_join_changes_nothing(tmp_path: Path, restart: bool) -> None:
    run = Asked(tmp_path)
    run.cast("a")
    first = run.last_id + 1
    assert isinstance(run.join("trainer.2", id=first), JoinReply)
    assert isinstance(run.join("trainer.2", id=first), JoinReply)  # the first answer was lost
    for group, lease in run.leases("a"):
        run.push(group, lease, "a")
        done = RegisterOccupy(group=group, lease=lease)
        assert run.operate("shard.1", Role.SERVER, done) == [None]
    sealed = run.interpreter.machine.sealed_batch(Step(0))
    assert sealed is not None
    run.publish(1, sealed.batch)
    if restart:
        run.stop()
        run.start()
    before = run.interpreter.machine.snapshot()
    for trainer in ("trainer.2", "trainer.1"):
        echo = run.join(trainer, id=first if trainer == "trainer.2" else 4)
        assert isinstance(echo, Refusal)
        assert echo.code is Code.FENCED
    assert run.interpreter.machine.snapshot() == before
    assert isinstance(run.join("trainer.2", id=first + 100), JoinReply)  # an intended second join: a rollback
    assert run.interpreter.machine.version == 0
    run.stop()
