"""``PromptClient`` submits rows to real servers, and refuses by name what the run cannot use."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

import staleflow
from staleflow.net.client import worker_id
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.wire.messages import Done, Drain, GetStatus, SchedulerStatus
from tests.servers.running import WEIGHTS, Run, StageWorker

SUBMITTED = {"path": "", "submitted": True, "max_pending": 8, "max_row_bytes": 200}


def row(number: int) -> dict[str, Any]:
    return {"prompt": f"{number} + 1", "answer": number + 1}


async def started(make_run: Callable[..., Run], **sections: dict[str, Any]) -> Run:
    run = make_run(**{"prompts": SUBMITTED} | sections)
    run.scheduler()
    run.trajectories()
    run.parameters()
    return run


async def test_the_blocking_client_submits_and_reads_outcomes(make_run: Callable[..., Run]) -> None:
    run = await started(make_run)
    trainer = await run.trainer()
    await trainer.publish(0, WEIGHTS)
    none_yet = asyncio.Event()
    loop = asyncio.get_running_loop()

    def work() -> list[tuple[int, str, int | None, float | None]]:
        with staleflow.PromptClient(run.run_dir, name="prompts-blocking") as client:
            assert client.config.prompts.max_pending == 8
            assert client.submit([row(0)], id="mine") == [0]
            assert client.submit([row(0)], id="mine") == [0]
            assert client.finish([row(1)]) == [1]
            assert client.outcomes(timeout_s=0) == []
            loop.call_soon_threadsafe(none_yet.set)
            got = list[staleflow.Outcome]()
            while len(got) < 2:
                got += client.outcomes(got[-1].number if got else 0)
            return [(one.row, one.result.value, one.step, one.reward) for one in got]

    working = asyncio.create_task(asyncio.to_thread(work))
    waiting = asyncio.create_task(none_yet.wait())
    await asyncio.wait((working, waiting), return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    rollout = await run.rollout()
    await rollout.push(*await rollout.leases(2))
    stage, done = StageWorker(run), 0
    while done < 2:
        items, _ = await stage.take()
        done += len(items)
        assert {result.code for result in await stage.finish(items)} <= {None}
    batch = await trainer.next_batch(0)
    await trainer.publish(1, WEIGHTS, batch.batch)
    assert sorted(await working) == [(0, "trained", 0, 0.5), (1, "trained", 0, 0.5)]


async def test_a_row_that_the_run_cannot_use_is_named_and_nothing_is_sent(make_run: Callable[..., Run]) -> None:
    run = await started(make_run, prompts=SUBMITTED | {"columns": {"prompt": "question"}})
    async with staleflow.AsyncPromptClient(run.where.scheduler) as client:
        good = {"question": "1 + 1"}
        for bad, text in (
            ({"prompt": "x"}, 'row 1 has no column "question" (it has prompt)'),
            ({"question": 3}, 'row 1: column "prompt" must be text, it is int'),
            ({"question": "x", "more": object()}, "row 1 cannot be sent"),
            ({"question": "x" * 300}, "row 1 has 311 bytes; prompts.max_row_bytes allows 200"),
            ("x", "row 1 must be a dict of columns, it is str"),
        ):
            with pytest.raises(staleflow.PromptError) as error:
                await client.submit([good, bad])  # type: ignore[list-item]
            assert text in str(error.value)
        assert await client.submit([good]) == [0]


async def test_many_rows_wait_for_room_and_are_numbered_in_order(make_run: Callable[..., Run]) -> None:
    run = await started(make_run, staleness={"max_staleness": 20})
    async with staleflow.AsyncPromptClient(run.where.scheduler) as client:
        with pytest.raises(staleflow.Unavailable) as error:
            await client.submit(map(row, range(20)), id="many", timeout_s=15.0)  # for each of its parts
        assert "8 rows are pending; prompts.max_pending allows 8" in str(error.value)
        waiting = asyncio.create_task(client.submit(map(row, range(20)), id="many"))
        await (await run.trainer()).publish(0, WEIGHTS)
        rollout = await run.rollout(capacity=40)
        assert sorted(assign.group for assign in await rollout.leases(20)) == list(range(20))
        assert await waiting == list(range(20))


async def test_the_run_must_take_submitted_prompts(make_run: Callable[..., Run]) -> None:
    run = make_run()
    run.scheduler()
    run.trajectories()
    with pytest.raises(staleflow.ConfigError, match=r"prompts.submitted is false; the run must be started with true"):
        async with staleflow.AsyncPromptClient(run.where.scheduler):
            raise AssertionError


async def test_after_the_last_rows_others_are_refused(make_run: Callable[..., Run]) -> None:
    run = await started(make_run)
    async with staleflow.AsyncPromptClient(run.where.scheduler, name="prompts-a") as client:
        await client.finish([row(0)])
        with pytest.raises(staleflow.Refused, match="finished by a client") as error:
            await client.submit([row(1)])
        assert error.value.code is Code.CONFLICT
        assert not client.ended


async def test_a_draining_run_takes_no_rows(make_run: Callable[..., Run]) -> None:
    run = await started(make_run)
    async with staleflow.AsyncPromptClient(run.where.scheduler) as client:
        await client.submit([row(0)])
        await run.client(run.where.scheduler, worker_id("admin")).ask(Drain(why="test"), Done)
        assert await client.submit([row(1)]) == []
        assert client.ended


async def test_clients_are_attached_under_their_names(make_run: Callable[..., Run]) -> None:
    run = await started(make_run)
    async with staleflow.AsyncPromptClient(run.where.scheduler, name="prompts-a"):
        status = await run.client(run.where.scheduler, worker_id("monitor")).ask(GetStatus(), SchedulerStatus)
        assert ("prompts-a", "prompts") in [(one.name, one.role) for one in status.workers]
    with pytest.raises(staleflow.ConfigError, match="reserved for processes of role trainer"):
        async with staleflow.AsyncPromptClient(run.where.scheduler, name="trainer"):
            raise AssertionError
