"""Pushes and moving samples outside the run's limits are refused by name and traced, and delay no other push."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from staleflow.net.client import worker_id
from staleflow.net.errors import Refused
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.consistency.ids import GroupId, LeaseId
from staleflow.protocols.wire.messages import (
    Done,
    ModelLimits,
    PartialFrames,
    PushGroups,
    PushItem,
    PutPartial,
    Result,
    Results,
)
from staleflow.protocols.wire.tensors import specs_and_frames
from staleflow.protocols.wire.trajectory import GroupPayload
from tests.servers.running import WEIGHTS, Rollout, Run, eventually, payload

MODEL = ModelLimits(vocabulary=1000, context=100)


async def started(run: Run) -> Rollout:
    trainer = await run.trainer(model=MODEL)
    await trainer.publish(0, WEIGHTS)
    return await run.rollout()


async def push(rollout: Rollout, *groups: GroupPayload) -> list[Result]:
    """Push groups under the newest leases in one message."""
    assigns = (await rollout.leases(len(groups)))[-len(groups) :]
    items: list[PushItem] = []
    frames: list[memoryview] = []
    for assign, group in zip(assigns, groups, strict=True):
        specs, more = specs_and_frames(group.to_arrays())
        item = PushItem(group=assign.group, lease=assign.lease, worker=rollout.worker, truncated=False, frames=specs)
        items.append(item)
        frames += more
    return (await rollout.shards[0].ask(PushGroups(items=items), Results, frames)).results


def foreign() -> GroupPayload:
    """A group with tokens of another tokenizer."""
    group = payload(0)
    group.token_ids[0] = 1_000_000
    return group


def rejects(run_dir: Path) -> list[dict[str, Any]]:
    lines = [msgspec.json.decode(line) for line in (run_dir / "trace.jsonl").read_bytes().splitlines()]
    return [line for line in lines if line["ev"] == "reject"]


async def test_a_token_beyond_the_vocabulary_is_refused_traced_and_costs_no_other_group(run: Run) -> None:
    rollout = await started(run)
    bad, good = await push(rollout, foreign(), payload(0))
    assert (bad.code, good.code) == (Code.MALFORMED, None)
    assert bad.detail.startswith("token_ids holds 1000000; the model's vocabulary has 1000 tokens")

    async def traced() -> list[dict[str, Any]]:
        return rejects(run.run_dir)

    (line,) = await eventually(traced)
    assert (line["op"], line["worker"], line["code"], line["count"]) == ("push", rollout.worker, "malformed", 1)
    assert "group" in line
    assert "lease" in line


async def test_a_worker_without_an_environment_cannot_reward_its_own_group(run: Run) -> None:
    rollout = await started(run)
    claimed = payload(0)
    claimed.stages["stage/environment/reward"] = np.ones(2, np.float32)
    bad, good = await push(rollout, claimed, payload(0))
    assert (bad.code, good.code) == (Code.MALFORMED, None)
    assert bad.detail.startswith("a push has the stage columns stage/environment/reward; it may have none")


async def test_a_sample_that_is_longer_than_the_run_allows_is_refused(make_run: Callable[..., Run]) -> None:
    run = make_run(rollout={"max_new_tokens": 64})
    run.scheduler()
    run.trajectories()
    run.parameters()
    rollout = await started(run)
    (result,) = await push(rollout, payload(0, tokens=65))
    assert (result.code, result.detail) == (Code.OVERSIZE, "a sample has 65 sampled tokens; the run allows 64")
    assert [one.code for one in await push(rollout, payload(0, tokens=64))] == [None]


async def test_a_shard_that_starts_again_knows_the_model_before_it_takes_a_push(run: Run) -> None:
    """Holds also after a restart of the scheduler, while no trainer is attached."""
    rollout = await started(run)
    await rollout.leases(2)
    for server in ("trajectories-0", "scheduler"):
        await run.stop(server)
    run.scheduler()
    run.trajectories()
    codes = list[Code | None]()

    async def answered() -> bool:
        codes.extend(one.code for one in await push(rollout, foreign()))
        return codes[-1] is not Code.BUSY  # it does not know the model yet

    await eventually(answered)
    assert {*codes} <= {Code.BUSY, Code.MALFORMED}
    assert codes[-1] is Code.MALFORMED


async def test_a_trainer_with_another_model_changes_the_limits(run: Run) -> None:
    rollout = await started(run)
    assert [one.code for one in await push(rollout, foreign())] == [Code.MALFORMED]
    await run.trainer(model=ModelLimits(vocabulary=2_000_000))

    async def taken() -> bool:
        return [one.code for one in await push(rollout, foreign())] == [None]

    await eventually(taken)


async def test_before_a_trainer_has_joined_nothing_is_taken(run: Run) -> None:
    """No payload can exist before a trainer publishes version 0."""
    specs, frames = specs_and_frames(payload(0).to_arrays())
    worker = worker_id("rollout-0")
    item = PushItem(group=GroupId(1), lease=LeaseId(1), worker=worker, truncated=False, frames=specs)
    (result,) = (await run.shard(worker).ask(PushGroups(items=[item]), Results, frames)).results
    assert (result.code, "no trainer has joined" in result.detail) == (Code.BUSY, True)


@pytest.mark.parametrize("says", ["token_ids holds 1000000", "stage columns stage/environment/reward"])
async def test_samples_that_move_are_held_to_the_same_limits(run: Run, says: str) -> None:
    rollout = await started(run)
    (assign, *_) = await rollout.leases(1)
    assert [one.code for one in await push(rollout, payload(0))] == [None]  # the shard knows the model
    group = foreign()
    if "stage" in says:
        group.stages["stage/environment/reward"] = np.zeros(2, np.float32)
    specs, frames = specs_and_frames(group.to_arrays())
    put = PutPartial(group=assign.group, lease=assign.lease, partial=PartialFrames(origin=assign.lease, frames=specs))
    with pytest.raises(Refused, match=says) as no:
        await rollout.shards[0].ask(put, Done, frames)
    assert no.value.code is Code.MALFORMED


async def test_samples_of_a_group_of_another_size_are_refused(run: Run) -> None:
    rollout = await started(run)
    assert [one.code for one in await push(rollout, payload(0))] == [None]
    specs, frames = specs_and_frames(payload(0, samples=3).to_arrays())
    put = PutPartial(group=GroupId(1), lease=LeaseId(5), partial=PartialFrames(origin=LeaseId(5), frames=specs))
    with pytest.raises(Refused, match="a group has 2 samples; 3 came"):
        await rollout.shards[0].ask(put, Done, frames)
