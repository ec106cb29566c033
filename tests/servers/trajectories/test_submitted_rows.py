"""A trajectory server gets the rows that clients submit from the scheduler, whenever somebody needs them."""

from collections.abc import Callable
from typing import Any

from staleflow.clients.prompt_client import AsyncPromptClient
from staleflow.net.client import worker_id
from staleflow.protocols.consistency.ids import GroupId
from staleflow.protocols.wire.messages import SUBMITTED_ROWS, GetGroups, GetRows, Groups, Rows
from staleflow.servers.trajectories.prompts import SubmittedPrompts
from tests.servers.running import WEIGHTS, Run, StageWorker

SUBMITTED = {"path": "", "submitted": True}


def rows(count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"{number} + 1", "answer": number + 1} for number in range(count)]


async def started(make_run: Callable[..., Run]) -> Run:
    run = make_run(prompts=SUBMITTED)
    run.scheduler()
    run.parameters()
    run.trajectories()
    return run


async def test_workers_stages_and_trainers_get_the_submitted_row(make_run: Callable[..., Run]) -> None:
    """Also from a shard that has started again, and so has no row in memory."""
    run = await started(make_run)
    trainer = await run.trainer()
    await trainer.publish(0, WEIGHTS)
    async with AsyncPromptClient(run.where.scheduler) as client:
        assert await client.submit(rows(2)) == [0, 1]
    rollout = await run.rollout()
    leased = await rollout.leases(2)
    given = await run.shard(rollout.worker).ask(GetRows(groups=[assign.group for assign in leased]), Rows)
    assert given.rows == rows(2)
    await rollout.until_room()
    await rollout.push(*leased)
    await run.stop("trajectories-0")
    run.trajectories()
    stage = StageWorker(run)
    items, _ = await stage.take()
    while len(items) < 2:
        items += (await stage.take(held=items))[0]
    assert sorted((item.group, item.row["prompt"]) for item in items) == [(0, "0 + 1"), (1, "1 + 1")]
    assert {result.code for result in await stage.finish(items)} == {None}
    batch = await trainer.next_batch(0)
    await run.stop("trajectories-0")
    run.trajectories()
    for checks in (False, True):
        fetch = GetGroups(
            groups=[member.group for member in batch.members],
            shas=[member.sha for member in batch.members],
            checks=checks,
        )
        groups, _ = await run.shard(trainer.worker).call(fetch)
        assert isinstance(groups, Groups)
        assert [group.row for group in groups.groups] == [rows(2)[member.group] for member in batch.members]


async def test_the_row_of_a_group_that_is_over_or_never_was_is_empty(make_run: Callable[..., Run]) -> None:
    """Other rows of the same request are given."""
    run = await started(make_run)
    async with AsyncPromptClient(run.where.scheduler) as client:
        await client.submit(rows(1))
    ask = GetRows(groups=[GroupId(0), GroupId(7), GroupId(SUBMITTED_ROWS)])
    given = await run.shard(worker_id("rollout-0")).ask(ask, Rows)
    assert given.rows == [*rows(1), {"prompt": ""}, *rows(1)]


async def test_a_shard_keeps_few_rows_and_requests_the_others_again(make_run: Callable[..., Run]) -> None:
    run = await started(make_run)
    many = [{"prompt": "x" * 1000, "number": number} for number in range(1500)]  # more than one message may carry
    async with AsyncPromptClient(run.where.scheduler) as client:
        assert await client.submit(many) == list(range(1500))
    prompts = SubmittedPrompts(run.client(run.where.scheduler, worker_id("trajectories-1")), cache_bytes=10_000)
    groups = [GroupId(number) for number in range(1500)]
    for _ in range(2):
        fetched = await prompts.fetch(groups)
        assert [fetched[group] for group in groups] == many
    assert not prompts.has(groups)
    assert prompts.has(groups[-8:])
    assert prompts.row(groups[-1]) == many[-1]
    first = await prompts.fetch(groups, most_bytes=1)
    assert list(first.values()) == many[: len(first)]
