"""A shard that is killed at any instant recovers everything it acknowledged and continues without help."""

import asyncio
from collections.abc import Callable

import pytest

from staleflow.protocols.wire.messages import Assign, GetGroups, GetRows, Groups, Rows, StageItem
from staleflow.servers.trajectories.shard import Shard
from tests.servers.running import WEIGHTS, Run, StageWorker, eventually

WIDE = {
    "rollout": {"group_size": 2, "max_inflight": 512},
    "trainer": {"batch_size": 16},
}


async def pushing(run: Run, acknowledged: list[Assign]) -> None:
    """Push one group after another without end; append the acknowledged ones to ``acknowledged``."""
    rollout = await run.rollout(capacity=48)
    while True:
        assign = (await rollout.leases(1))[0]
        if (await rollout.push(assign, timeout_s=None))[0].code is None:
            acknowledged.append(assign)


async def test_what_a_killed_shard_acknowledged_is_recovered(make_run: Callable[..., Run]) -> None:
    run = make_run(**WIDE)
    run.scheduler()
    run.parameters()
    run.process("trajectories", 0)
    trainer = await run.trainer()
    await trainer.publish(0, WEIGHTS)
    acknowledged: list[Assign] = []
    worker = asyncio.create_task(pushing(run, acknowledged))
    for enough in (6, 16, 32):
        async with asyncio.timeout(20):
            while len(acknowledged) < enough:  # noqa: ASYNC110
                await asyncio.sleep(0.002)
        assert run.kill("trajectories-0") == -9
        run.process("trajectories", 0)
    stage = StageWorker(run)
    seen: dict[int, int] = {}
    async with asyncio.timeout(30):
        while not {assign.group for assign in acknowledged} <= seen.keys():
            items, _ = await stage.take()
            seen |= {item.group: item.lease for item in items}
            assert {result.code for result in await stage.finish(items)} <= {None}
    worker.cancel()
    assert all(seen[assign.group] == assign.lease for assign in acknowledged)
    batch = await trainer.next_batch(0)
    fetch = GetGroups(groups=[m.group for m in batch.members], shas=[m.sha for m in batch.members])
    groups, _ = await run.shard(trainer.worker).call(fetch)
    assert isinstance(groups, Groups)
    assert [group.group for group in groups.groups] == fetch.groups


async def test_a_group_that_a_stage_had_at_a_kill_goes_to_the_stage_again(
    make_run: Callable[..., Run],
) -> None:
    run = make_run()
    run.scheduler()
    run.parameters()
    run.process("trajectories", 0)
    trainer = await run.trainer()
    await trainer.publish(0, WEIGHTS)
    rollout = await run.rollout()
    leased = await rollout.leases(2)
    await rollout.until_room()
    assert {result.code for result in await rollout.push(*leased)} == {None}
    stage = StageWorker(run)
    before = await taken(stage, len(leased))
    run.kill("trajectories-0")
    run.process("trajectories", 0)
    after = await taken(stage, len(leased))
    pushed = sorted((assign.group, assign.lease) for assign in leased)
    for items in (before, after):
        assert sorted((item.group, item.lease) for item in items) == pushed
    assert {item.ticket for item in before}.isdisjoint({item.ticket for item in after})


async def taken(stage: StageWorker, count: int) -> list[StageItem]:
    """Take ``count`` groups and finish none of them."""
    items: list[StageItem] = []
    async with asyncio.timeout(30):
        while len(items) < count:
            items += (await stage.take(held=items))[0]
    return items


async def test_a_shard_that_ends_in_order_answers_what_it_has_taken(run: Run) -> None:
    trainer = await run.trainer()
    await trainer.publish(0, WEIGHTS)
    rollout = await run.rollout()
    leased = await rollout.leases(2)
    results = asyncio.create_task(rollout.push(*leased))
    await eventually(lambda: _unregistered(run))
    await run.stop("trajectories-0")
    assert {result.code for result in await results} == {None}


async def _unregistered(run: Run) -> bool:
    status = await run.status(run.where.trajectories[0])
    return bool(status["groups"])


async def test_a_push_that_is_sent_again_before_the_shard_has_recovered_is_answered(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    recover, may_recover = Shard.recover, asyncio.Event()

    async def recover_later(shard: Shard) -> None:
        await may_recover.wait()
        await recover(shard)

    trainer = await run.trainer()
    await trainer.publish(0, WEIGHTS)
    rollout = await run.rollout()
    leased = (await rollout.leases(1))[0]
    await rollout.push(leased)
    stage = StageWorker(run)
    await stage.finish((await stage.take())[0])
    await run.stop("trajectories-0")
    monkeypatch.setattr(Shard, "recover", recover_later)
    run.trajectories()
    await rollout.until_room()  # the shard knows the model and has recovered nothing yet
    again = asyncio.create_task(rollout.push(leased, timeout_s=None))
    await asyncio.sleep(0)  # the message is sent, so any reply on this connection from now on follows it
    await rollout.shards[0].ask(GetRows(groups=[leased.group]), Rows)
    assert not again.done()
    may_recover.set()
    async with asyncio.timeout(60):
        assert [result.code for result in await again] == [None]
