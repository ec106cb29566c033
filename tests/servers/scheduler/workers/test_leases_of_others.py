"""The key of a worker can release that worker's leases only, and no group that was pushed and acknowledged."""

from pathlib import Path

import pytest

from staleflow.net.permissions import Role
from staleflow.protocols.consistency.effects import Code, ReleaseWhy
from staleflow.protocols.consistency.groups import State
from staleflow.protocols.consistency.ids import Lineage, Version
from staleflow.protocols.wire.messages import RegisterRelease, RegisterYield
from tests.servers.scheduler.asked import Asked


@pytest.mark.parametrize("why", [ReleaseWhy.ABORTED, ReleaseWhy.FILTERED])
def test_a_worker_releases_its_own_leases_only(tmp_path: Path, why: ReleaseWhy) -> None:
    run = Asked(tmp_path)
    run.cast("a", "b")
    (group, lease), *_ = run.leases("a")
    release = RegisterRelease(group=group, lease=lease, why=why)
    assert run.operate("b", Role.ROLLOUT, release) == [Code.STALE_LEASE]
    give_up = RegisterYield(group=group, lease=lease, lineage=Lineage(0), version=Version(0), sha="")
    assert run.operate("b", Role.ROLLOUT, give_up) == [Code.STALE_LEASE]
    assert (group, lease) in run.leases("a")

    run.push(group, lease, "a")
    for worker in ("a", "b"):
        assert run.operate(worker, Role.ROLLOUT, release) == [Code.STALE_LEASE]
    held = run.interpreter.machine.group(group)
    assert held is not None
    assert held.state is State.PUSHED

    *_, (group, lease) = run.leases("a")
    mine = RegisterRelease(group=group, lease=lease, why=ReleaseWhy.ABORTED)
    assert run.operate("a", Role.ROLLOUT, mine, mine) == [None, None]
    run.stop()
