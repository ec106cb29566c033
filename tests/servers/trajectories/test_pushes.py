"""A push is acknowledged once durable and registered; a retry gets the same reply; every rejection has its code."""

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from staleflow.net.errors import Refused
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.consistency.ids import GroupId, LeaseId
from staleflow.protocols.wire.messages import Assign, GetRows, PushGroups, PushItem, Results, Rows
from staleflow.protocols.wire.tensors import Array, specs_and_frames
from tests.servers.running import WEIGHTS, Rollout, Run, StageWorker, eventually, payload
from tests.servers.trajectories.remote_engine import Engine


async def started(run: Run, capacity: int = 8) -> Rollout:
    trainer = await run.trainer()
    await trainer.publish(0, WEIGHTS)
    return await run.rollout(capacity=capacity)


async def groups(run: Run) -> dict[str, int]:
    found: dict[str, int] = (await run.status(run.where.trajectories[0]))["groups"]
    return found


async def test_a_push_that_is_sent_again_gets_the_same_answer_and_has_one_effect(run: Run) -> None:
    rollout = await started(run)
    leased = (await rollout.leases(1))[0]
    assert [r.code for r in await rollout.push(leased)] == [None]
    assert [r.code for r in await rollout.push(leased)] == [None]
    assert await groups(run) == {"staging": 1}
    status = await run.status(run.where.scheduler)
    assert status["totals"]["pushes"] == 1


async def test_the_same_push_twice_in_one_message_has_one_effect(run: Run) -> None:
    rollout = await started(run)
    leased = (await rollout.leases(1))[0]
    assert [r.code for r in await rollout.push(leased, leased)] == [None, None]
    assert await groups(run) == {"staging": 1}


async def test_the_same_lease_with_other_bytes_is_a_conflict_and_the_first_wins(run: Run) -> None:
    rollout = await started(run)
    leased = (await rollout.leases(1))[0]
    await rollout.push(leased)
    items, _ = await StageWorker(run).take()
    assert [r.code for r in await rollout.push(leased, seed=1)] == [Code.CONFLICT]
    await run.stop("trajectories-0")
    run.trajectories()
    again, _ = await StageWorker(run).take()
    assert [item.group for item in again] == [item.group for item in items]
    assert [r.code for r in await rollout.push(leased, seed=1)] == [Code.CONFLICT]


async def test_a_push_without_a_lease_is_refused_and_its_payload_forgotten(run: Run) -> None:
    rollout = await started(run)
    leased = (await rollout.leases(1))[0]
    stranger = Assign(
        group=leased.group, lease=LeaseId(leased.lease + 1000), lineage=leased.lineage, version=leased.version, shard=0
    )
    assert [r.code for r in await rollout.push(stranger)] == [Code.STALE_LEASE]
    assert await groups(run) == {}
    assert [r.code for r in await rollout.push(leased)] == [None]


async def test_pushes_wait_for_a_scheduler_that_is_away(run: Run) -> None:
    rollout = await started(run)
    leased = (await rollout.leases(1))[0]
    await run.stop("scheduler")
    push = asyncio.create_task(rollout.push(leased, timeout_s=None))
    assert await eventually(lambda: groups(run)) == {"registering": 1}
    rows = await rollout.shards[0].ask(GetRows(groups=[GroupId(3)]), Rows)
    assert rows.rows == [{"prompt": "3 + 1", "answer": 4}]
    run.scheduler()
    assert [r.code for r in await push] == [None]


def _without(name: str) -> dict[str, Array]:
    arrays = payload(0).to_arrays()
    del arrays[name]
    return arrays


@pytest.mark.parametrize(
    ("arrays", "says"),
    [
        (_without("logprobs"), "lacks logprobs"),
        (payload(0, samples=3).to_arrays(), "3 samples received; a group has 2"),
        (payload(0).to_arrays() | {"token_ids": np.zeros(3, np.int32)}, "token_ids holds 3 values"),
        (payload(0).to_arrays() | {"stage/reward/reward": np.zeros(2, np.float32)}, "it may have none"),
    ],
)
async def test_a_malformed_payload_is_refused_by_name(run: Run, arrays: dict[str, Array], says: str) -> None:
    rollout = await started(run)
    leased = (await rollout.leases(1))[0]
    specs, frames = specs_and_frames(arrays)
    item = PushItem(group=leased.group, lease=leased.lease, worker=rollout.worker, truncated=False, frames=specs)
    (result,) = (await rollout.shards[0].ask(PushGroups(items=[item]), Results, frames)).results
    assert (result.code, says in result.detail) == (Code.MALFORMED, True)
    assert [r.code for r in await rollout.push(leased)] == [None]


async def test_frames_that_were_not_announced_are_refused(run: Run) -> None:
    rollout = await started(run)
    with pytest.raises(Refused, match="0 frames announced, 1 received"):
        await rollout.shards[0].ask(PushGroups(items=[]), Results, [b"x"])


async def test_a_small_map_refuses_pushes_and_recovers_alone(make_run: Callable[..., Run]) -> None:
    wide: dict[str, Any] = {
        "rollout": {"group_size": 2, "max_inflight": 512},
        "trainer": {"batch_size": 16},
        "trajectories": {"map_mb": 1, "durability": "power"},
    }
    run = make_run(**wide)
    run.scheduler()
    run.trajectories()
    run.parameters()
    rollout = await started(run, capacity=48)
    leased = (await rollout.leases(24))[:24]
    engine = Engine(rollout, rollout.shards[0])
    engine.put(*leased)
    status: dict[str, Any] = {}

    async def full() -> bool:
        nonlocal status
        status = await run.status(run.where.trajectories[0])
        return bool(status["full"] == "map")

    await eventually(full)
    assert status["used_share"] <= 1.0
    assert len(status["groups"]) > 0

    async def why() -> str:
        return str((await run.status(run.where.scheduler))["why"])

    async def named() -> bool:
        return (await why()).startswith("trajectory server 0 is full (")

    await eventually(named)
    stage = StageWorker(run)
    done = 0
    async with asyncio.timeout(60):
        while done < len(leased):
            items, _ = await stage.take(wait_ms=500)
            await stage.finish(items, rewards=(1.0, 1.0))
            done += len(items)
    await engine.idle()
    assert engine.codes == {assign.group: [None] for assign in leased}
    engine.close()

    async def unnamed() -> bool:
        return "is full" not in await why()

    await eventually(unnamed)


async def test_a_payload_that_never_fits_is_refused_for_good(make_run: Callable[..., Run]) -> None:
    run = make_run(trajectories={"map_mb": 1})
    run.scheduler()
    run.trajectories()
    run.parameters()
    rollout = await started(run)
    leased = (await rollout.leases(1))[0]
    specs, frames = specs_and_frames(payload(0, tokens=60_000).to_arrays())
    item = PushItem(group=leased.group, lease=leased.lease, worker=rollout.worker, truncated=False, frames=specs)
    answer = await rollout.shards[0].ask(PushGroups(items=[item]), Results, frames)
    assert [result.code for result in answer.results] == [Code.OVERSIZE]
