"""One group passes every state of its life: leased, pushed, rewarded, sealed, fetched, consumed."""

import numpy as np

from staleflow.protocols.wire.messages import GetGroups, Groups
from staleflow.protocols.wire.tensors import arrays
from tests.servers.running import WEIGHTS, Run, StageWorker


async def test_what_is_pushed_is_rewarded_sealed_fetched_and_consumed(run: Run) -> None:
    trainer = await run.trainer()
    await trainer.publish(0, WEIGHTS)
    rollout = await run.rollout()
    stage = StageWorker(run)
    leased = await rollout.leases(2)
    assert [result.code for result in await rollout.push(*leased)] == [None] * len(leased)
    items, _ = await stage.take()
    assert [item.row["answer"] for item in items] == [item.group % 40 + 1 for item in items]
    assert [result.code for result in await stage.finish(items)] == [None] * len(items)
    batch = await trainer.next_batch(0)
    fetch = GetGroups(groups=[m.group for m in batch.members], shas=[m.sha for m in batch.members])
    groups, frames = await run.shard(trainer.worker).call(fetch)
    assert isinstance(groups, Groups)
    first = arrays(groups.groups[0].frames, frames[: len(groups.groups[0].frames)])
    np.testing.assert_array_equal(first["stage/reward/reward"], np.asarray([0.0, 1.0], np.float32))
    registered = await trainer.publish(1, WEIGHTS, batch.batch)
    assert registered.version == 1
