"""Stages after the reward run in order, add their columns, and skip the groups that the filter removed."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from staleflow.net.client import worker_id
from staleflow.net.errors import Refused
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.consistency.ids import GroupId
from staleflow.protocols.wire.messages import Attach, AttachReply, GetGroups, Groups
from staleflow.protocols.wire.tensors import Array, arrays
from tests.servers.running import GROUP_SIZE, WEIGHTS, Run, StageWorker, eventually

TOKENS = 5 * GROUP_SIZE
LOGPROBS = -np.arange(1, TOKENS + 1, dtype=np.float32)
VALUES = np.linspace(-1, 1, TOKENS, dtype=np.float32)
NOWHERE: dict[str, Any] = {"reference": {"path": "/nowhere"}, "critic": {"path": "/nowhere"}}
ALGORITHM = {"algorithm": {"kl_coef": 0.1, "advantage": "gae"}}


@pytest.fixture
async def run(make_run: Callable[..., Run]) -> Run:
    """A run with three stages: reward, reference, critic."""
    return started(make_run)


def started(make_run: Callable[..., Run], **more: Any) -> Run:
    run = make_run(**NOWHERE, **more, trainer=ALGORITHM, rollout={"filter": "zero_spread"})
    run.scheduler()
    run.trajectories()
    run.parameters()
    return run


async def pushed(run: Run, count: int = 2, read: int = 0) -> None:
    trainer = await run.trainer()
    await trainer.publish(0, WEIGHTS)
    rollout = await run.rollout()
    await rollout.push(*(await rollout.leases(count))[:count], read=read)


async def totals(run: Run) -> dict[str, Any]:
    found: dict[str, Any] = (await run.status(run.where.scheduler))["totals"]
    return found


async def queues(run: Run) -> dict[str, int]:
    """Number of groups that wait for each stage."""
    status = await run.status(run.where.trajectories[0])
    return {stage: queue["waiting"] for stage, queue in status["queues"].items()}


async def judged(run: Run, stage: str, columns: dict[str, Array], name: str = "") -> list[GroupId]:
    """Finish every group that waits for one stage."""
    worker = StageWorker(run, name or f"{stage}-0", stage=stage)
    items, _ = await worker.take()
    assert {result.code for result in await worker.give(items, columns)} == {None}
    return [item.group for item in items]


REWARDS = {"reward": np.asarray([0.0, 1.0], np.float32)}


async def test_a_group_goes_through_every_stage_in_order_and_the_trainer_gets_what_each_made(run: Run) -> None:
    await pushed(run)
    groups = await judged(run, "reward", REWARDS)
    assert (await totals(run))["occupies"] == 0
    reference = StageWorker(run, "reference-0", stage="reference")
    items, frames = await reference.take()
    assert [item.group for item in items] == groups
    seen = arrays(items[0].frames, frames[: len(items[0].frames)])
    assert seen["stage/reward/reward"].tolist() == [0.0, 1.0]
    await reference.give(items, {"logprobs": LOGPROBS})
    assert await judged(run, "critic", {"values": VALUES}) == groups

    async def sealed() -> bool:
        return bool((await totals(run))["occupies"] == 2)

    assert await eventually(sealed)
    batch = await (trainer := await run.trainer("other")).next_batch(0)
    fetch = GetGroups(groups=[m.group for m in batch.members], shas=[m.sha for m in batch.members])
    answer, frames = await run.shard(trainer.worker).call(fetch)
    assert isinstance(answer, Groups)
    found = arrays(answer.groups[0].frames, frames[: len(answer.groups[0].frames)])
    assert found["stage/reference/logprobs"].tolist() == LOGPROBS.tolist()
    assert found["stage/critic/values"].tolist() == VALUES.tolist()


async def test_a_column_has_a_value_for_tokens_of_an_environment_too(make_run: Callable[..., Run]) -> None:
    run = started(make_run, environment={"run": "anywhere:Anything"})
    await pushed(run, read=2)
    groups = await judged(run, "reward", REWARDS)
    assert await judged(run, "reference", {"logprobs": LOGPROBS}) == groups
    assert await judged(run, "critic", {"values": VALUES}) == groups


async def test_what_the_filter_does_not_want_is_released_before_the_later_stages(run: Run) -> None:
    await pushed(run)
    count = len(await judged(run, "reward", {"reward": np.asarray([0.5, 0.5], np.float32)}))

    async def filtered() -> bool:
        return bool((await totals(run))["releases"].get("filtered", 0) == count)

    assert await eventually(filtered)
    assert await StageWorker(run, "reference-0", stage="reference").take(wait_ms=50) == ([], [])


async def test_after_a_restart_a_group_is_at_the_stage_where_it_was_and_the_filter_still_holds(run: Run) -> None:
    await pushed(run, count=4)
    reward = StageWorker(run)
    items, _ = await reward.take(most=3)
    await reward.finish(items)
    done = await judged(run, "reference", {"logprobs": LOGPROBS}, "reference-first")
    await run.stop("trajectories-0")
    run.trajectories()

    async def taken_up() -> bool:
        return (await queues(run)) == {"reward": 1, "reference": 0, "critic": 3}

    assert await eventually(taken_up)
    assert sorted(await judged(run, "critic", {"values": VALUES})) == sorted(done)


async def test_a_result_that_is_sent_again_is_answered_the_same_though_the_group_has_gone_on(run: Run) -> None:
    await pushed(run, count=1)
    reward = StageWorker(run)
    items, _ = await reward.take()
    assert {r.code for r in await reward.finish(items)} == {None}
    await judged(run, "reference", {"logprobs": LOGPROBS})
    assert {r.code for r in await reward.finish(items)} == {None}


async def test_groups_of_a_reference_worker_that_vanishes_go_to_another_and_its_late_answer_is_refused(
    run: Run,
) -> None:
    await pushed(run)
    await judged(run, "reward", REWARDS)
    first = StageWorker(run, "reference-0", stage="reference")
    items, _ = await first.take()
    first.client.close()
    second = StageWorker(run, "reference-1", stage="reference")
    again, _ = await second.take(wait_ms=20_000)
    assert [item.group for item in again] == [item.group for item in items]
    late = StageWorker(run, "reference-2", stage="reference")
    assert {r.code for r in await late.give(items, {"logprobs": LOGPROBS})} == {Code.STALE_LEASE}
    assert {r.code for r in await second.give(again, {"logprobs": LOGPROBS})} == {None}


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ({"logprobs": LOGPROBS[:GROUP_SIZE]}, "float32[2]; it must be float32[10], one value a completion token"),
        ({"logprobs": LOGPROBS[:-1]}, "stage/reference/logprobs is float32[9]; it must be float32[10]"),
        ({"logprobs": LOGPROBS.astype(np.float64).astype(np.int64)}, "stage/reference/logprobs is int64[10]"),
        ({"logprobs": np.where(LOGPROBS == -3, np.nan, LOGPROBS)}, "logprobs holds a value that is not finite"),
        ({"logprobs": -LOGPROBS}, "logprobs holds 10.0; a log-probability is at most 0"),
        ({"values": VALUES}, "the stage must make stage/reference/logprobs"),
    ],
)
async def test_columns_that_are_none_are_refused_by_name_and_release_the_group(
    run: Run, columns: dict[str, Array], says: str
) -> None:
    await pushed(run, count=1)
    await judged(run, "reward", REWARDS)
    for name in ("reference-0", "reference-1"):  # a second worker tries the group before it is given up
        reference = StageWorker(run, name, stage="reference")
        items, _ = await reference.take()
        answer = await reference.give(items, columns)
        assert [r.code for r in answer] == [Code.MALFORMED]
        assert says in answer[0].detail

    async def aborted() -> bool:
        return bool((await totals(run))["releases"].get("aborted", 0) == 1)

    assert await eventually(aborted)


async def attach(run: Run, name: str, stage: str) -> None:
    worker = worker_id(name)
    client = run.client(run.where.scheduler, worker)
    await client.ask(Attach(worker=worker, name=name, role="stage", stage=stage, slot=name), AttachReply)


async def test_a_second_critic_is_refused_by_name_but_a_new_process_takes_over_its_name(run: Run) -> None:
    await attach(run, "critic-0", "critic")
    with pytest.raises(Refused, match="critic-0 is this run's critic; there is only one"):
        await attach(run, "critic-1", "critic")
    await attach(run, "critic-0", "critic")
    await attach(run, "reference-0", "reference")
    await attach(run, "reference-1", "reference")


async def test_a_worker_of_a_stage_that_the_run_has_not_is_refused(make_run: Callable[..., Run]) -> None:
    run = make_run()
    run.scheduler()
    with pytest.raises(Refused, match='there is no stage "critic" in this run; it has reward'):
        await attach(run, "critic-0", "critic")


async def test_why_names_the_stages_that_nobody_serves(run: Run) -> None:
    await attach(run, "reward-0", "")
    await pushed(run)
    await judged(run, "reward", REWARDS)
    why = (await run.status(run.where.scheduler))["why"]
    assert why.endswith("2 are in stages; no reference and no critic worker is attached")
