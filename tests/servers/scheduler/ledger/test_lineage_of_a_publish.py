"""A version is published under the lineage that the ledger gives it, or rejected, as no worker could pull it."""

from pathlib import Path

from staleflow.net.permissions import Role
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.consistency.ids import Step
from staleflow.protocols.wire.messages import Refusal, RegisterOccupy, RegisterVersionReply
from tests.servers.scheduler.asked import Asked


def test_a_version_of_another_lineage_is_refused(tmp_path: Path) -> None:
    run = Asked(tmp_path)
    run.cast("a")
    for group, lease in run.leases("a"):
        run.push(group, lease, "a")
        done = RegisterOccupy(group=group, lease=lease)
        assert run.operate("shard.1", Role.SERVER, done) == [None]
    sealed = run.interpreter.machine.sealed_batch(Step(0))
    assert sealed is not None
    answer = run.publish(1, sealed.batch, lineage=7)
    assert isinstance(answer, Refusal)
    assert answer.code is Code.BAD_VERSION
    assert run.interpreter.machine.version == 0
    assert isinstance(run.publish(1, sealed.batch), RegisterVersionReply)
    seq = run.interpreter.trace.seq
    assert isinstance(run.publish(1, None), RegisterVersionReply), (
        "the parameter server has lost it, a trainer brings it again"
    )
    assert run.interpreter.trace.seq == seq
    assert isinstance(run.publish(2, None), Refusal)
    assert run.interpreter.machine.version == 1
    run.stop()
