"""Payload whose digest an earlier release computed, by SHA-256, is served and trained after an upgrade."""

import hashlib
from collections.abc import Callable, Iterable

import numpy as np
import pytest

from staleflow.clients.trainer.data.fetch import Fetcher
from staleflow.protocols.wire.codec import Data
from staleflow.protocols.wire.messages import GetGroups, Groups
from staleflow.trace.audit.report import audit
from tests.servers.running import WEIGHTS, Run, StageWorker, payload


def sha256(parts: Iterable[Data]) -> str:
    """Digest of a payload as earlier releases computed it."""
    return hashlib.sha256(b"".join(parts)).hexdigest()


async def test_payload_of_an_earlier_release_is_trained_beside_that_of_this_one(
    make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run()
    with monkeypatch.context() as earlier:
        earlier.setattr("staleflow.servers.trajectories.records.payload_digest", sha256)
        earlier.setattr("staleflow.protocols.consistency.snapshot.FORMAT", 4)
        run.scheduler()
        run.parameters()
        run.trajectories()
        trainer = await run.trainer()
        await trainer.publish(0, WEIGHTS)
        rollout = await run.rollout()
        old, new = (await rollout.leases(2))[:2]
        assert [result.code for result in await rollout.push(old)] == [None]
        for server in ("parameters", "trajectories-0", "scheduler"):
            await run.stop(server)
    run.scheduler()
    run.parameters()
    run.trajectories()
    await rollout.attach(capacity=8)
    await rollout.until_room()
    assert [result.code for result in await rollout.push(new)] == [None]
    stage = StageWorker(run)
    rewarded: set[int] = set()
    while rewarded != {old.group, new.group}:
        items, _ = await stage.take()
        assert {result.code for result in await stage.finish(items)} <= {None}
        rewarded |= {item.group for item in items}

    members = {member.group: member for member in (await trainer.next_batch(0)).members}
    assert len(members[old.group].sha) == 64
    assert members[new.group].sha.startswith("blake3:")
    shard = run.shard(trainer.worker)
    for mapped in (True, False):
        groups = await Fetcher([shard], mapped=mapped).members([members[old.group], members[new.group]])
        for assign, fetched in zip((old, new), groups, strict=True):
            expected = payload(assign.version, seed=assign.group).token_ids
            np.testing.assert_array_equal(fetched.payload.token_ids, expected)
    # The shard itself checks the bytes for a reader that does not.
    unchecked = GetGroups(groups=[*members], shas=[member.sha for member in members.values()])
    reply, _ = await shard.call(unchecked)
    assert isinstance(reply, Groups)
    assert audit(run.run_dir / "trace.jsonl").violations == []
