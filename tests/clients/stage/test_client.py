"""A client computes the columns of a stage for real servers, in both of its forms."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import staleflow
from staleflow.clients.stage.client import AsyncStageClient, StageClient, StageError
from staleflow.configs.errors import ConfigError
from tests.servers.running import WEIGHTS, Rollout, Run, StageWorker, Trainer


@asynccontextmanager
async def served(folder: Path) -> AsyncGenerator[tuple[Run, Trainer, Rollout]]:
    """Real servers with two pushed groups that wait for their rewards."""
    run = Run(folder)
    try:
        run.scheduler()
        run.trajectories()
        run.parameters()
        trainer = await run.trainer()
        await trainer.publish(0, WEIGHTS)
        rollout = await run.rollout()
        await rollout.push(*(await rollout.leases(2))[:2])
        yield run, trainer, rollout
    finally:
        await run.close()


async def test_groups_with_the_columns_of_a_client_are_trained(short_dir: Path) -> None:
    async with served(short_dir) as (run, trainer, _), AsyncStageClient(short_dir, "reward", name="judge") as client:
        trained: set[int] = set()
        async with asyncio.timeout(30):
            while len(trained) < 2:
                for work in await client.take(2):
                    assert work.row["answer"] == work.group + 1
                    assert work.payload.num_samples == 2
                    assert await client.put(work, {"reward": [0.0, 1.0]})
                    trained.add(work.group)
        batch = await trainer.next_batch(0)
        assert {member.group for member in batch.members} == trained
        assert client.config == run.config
        assert await client.take(timeout_s=0) == []


async def test_the_blocking_client_does_the_same_and_its_failures_go_to_another_worker(short_dir: Path) -> None:
    def work(address: str) -> list[int]:
        with StageClient(address, "reward", name="judge") as client:
            first, second = (next(client.groups()) for _ in range(2))
            assert client.put(first, {"reward": [0.0, 1.0]})
            assert client.fail(second, "the judge does not reply")
            with pytest.raises(
                StageError, match=f"group {second.group} is not with judge; each group is put or failed"
            ):
                client.put(second, {"reward": [0.0, 1.0]})
            return [first.group, second.group]

    async with served(short_dir) as (run, _, _):
        _, failed = await asyncio.to_thread(work, run.where.scheduler)
        items, _ = await StageWorker(run, "reward-9").take()
        assert [item.group for item in items] == [failed]


async def test_columns_that_do_not_match_the_stage_are_named_and_can_be_corrected(short_dir: Path) -> None:
    async with served(short_dir) as (_, _, _), AsyncStageClient(short_dir, "reward", name="judge") as client:
        (work,) = await client.take()
        for columns, text in (
            ({"reward": [1.0]}, r"stage/reward/reward is float32\[1\]; it must be float32\[2\], one value a sample"),
            ({"reward": [0.0, float("nan")]}, "stage/reward/reward holds a value that is not finite"),
            ({"score": [0.0, 1.0]}, "the stage must make stage/reward/reward"),
            (
                {"reward": [0.0, 1.0], "score": [0.0, 1.0]},
                "stage/reward/score, which is not one of stage/reward/reward",
            ),
            ({"reward": ["x", 1.0]}, "could not convert string to float"),
            ({}, "no columns; reward must make stage/reward/reward"),
        ):
            with pytest.raises(StageError, match=f"group {work.group}: .*{text}"):
                await client.put(work, columns)  # type: ignore[arg-type]
        assert await client.put(work, {"reward": [0.0, 1.0]})


async def test_a_stage_that_the_run_does_not_have_is_named(short_dir: Path) -> None:
    async with served(short_dir):
        with pytest.raises(ConfigError, match='there is no stage "judge" in this run; it has reward'):
            async with AsyncStageClient(short_dir, "judge", name="mine"):
                pass
    assert staleflow.StageClient is StageClient
