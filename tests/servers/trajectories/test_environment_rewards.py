"""Rewards that an environment returned become the group's rewards at once, without a stage worker."""

import asyncio
from collections.abc import Callable

import numpy as np

from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.wire.messages import Assign, GetGroups, Groups, PushGroups, PushItem, Result, Results
from staleflow.protocols.wire.stages import ENVIRONMENT_REWARD
from staleflow.protocols.wire.tensors import specs_and_frames
from tests.servers.running import WEIGHTS, Rollout, Run, eventually, payload

ENVIRONMENT = {"run": "anywhere:Anything"}
"""Only workers import it."""


async def push(rollout: Rollout, assign: Assign, *rewards: float, timeout_s: float | None = 20) -> Result:
    """Push a group whose environment returned these rewards."""
    group = payload(assign.version, seed=assign.group)
    group.stages[ENVIRONMENT_REWARD] = np.asarray(rewards, np.float32)
    specs, frames = specs_and_frames(group.to_arrays())
    item = PushItem(group=assign.group, lease=assign.lease, worker=rollout.worker, truncated=False, frames=specs)
    answer = await rollout.shards[0].ask(PushGroups(items=[item]), Results, frames, timeout_s=timeout_s)
    rollout.held.pop(assign.lease, None)
    return answer.results[0]


async def test_a_group_with_its_rewards_is_trained_though_no_stage_worker_is_there(
    make_run: Callable[..., Run],
) -> None:
    run = make_run(environment=ENVIRONMENT)
    run.scheduler()
    run.trajectories()
    run.parameters()
    trainer = await run.trainer()
    await trainer.publish(0, WEIGHTS)
    rollout = await run.rollout()
    for assign in await rollout.leases(2):
        assert (await push(rollout, assign, 0.25, 1.0)).code is None
    batch = await trainer.next_batch(0)
    fetch = GetGroups(groups=[m.group for m in batch.members], shas=[m.sha for m in batch.members])
    reply, frames = await run.shard(trainer.worker).call(fetch)
    assert isinstance(reply, Groups)
    names = [spec.name for spec in reply.groups[0].frames]
    assert np.frombuffer(frames[names.index("stage/reward/reward")], np.float32).tolist() == [0.25, 1.0]


async def test_the_filter_judges_them_too(make_run: Callable[..., Run]) -> None:
    run = make_run(environment=ENVIRONMENT)
    run.scheduler()
    run.trajectories()
    run.parameters()
    trainer = await run.trainer()
    await trainer.publish(0, WEIGHTS)
    rollout = await run.rollout()
    assign = (await rollout.leases(1))[0]
    assert (await push(rollout, assign, 0.5, 0.5)).code is None

    async def released() -> bool:
        totals = (await run.status(run.where.scheduler))["totals"]
        return bool(totals["releases"].get("filtered") == 1)

    await eventually(released)


async def test_after_a_kill_such_a_group_is_registered_before_it_is_occupied(make_run: Callable[..., Run]) -> None:
    """The scheduler is down, so it has registered none of the groups when the shard dies."""
    run = make_run(environment=ENVIRONMENT)
    run.scheduler()
    run.parameters()
    run.process("trajectories", 0)
    trainer = await run.trainer()
    await trainer.publish(0, WEIGHTS)
    rollout = await run.rollout()
    assigns = (await rollout.leases(2))[:2]
    await run.stop("scheduler")
    waiting = [asyncio.create_task(push(rollout, assign, 0.0, 1.0, timeout_s=None)) for assign in assigns]
    await asyncio.sleep(0.3)  # stored by now; if it is not, the assertions hold as well
    assert run.kill("trajectories-0") == -9
    run.scheduler()
    run.process("trajectories", 0)
    codes = [result.code for result in await asyncio.gather(*waiting)]
    assert set(codes) <= {None, Code.BUSY}  # busy until the shard knows the model again
    await rollout.until_room()
    for assign in assigns:
        assert (await push(rollout, assign, 0.0, 1.0)).code is None
    batch = await trainer.next_batch(0)
    assert {member.group for member in batch.members} == {assign.group for assign in assigns}
    assert (await push(rollout, assigns[0], 0.0, 1.0)).code is None  # the retry gets the same reply
