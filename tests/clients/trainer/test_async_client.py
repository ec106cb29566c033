"""A whole run over the asyncio clients, whose weights never pass through the run."""

import asyncio
from pathlib import Path

import pytest

import staleflow
from staleflow.clients.rollout.client import AsyncRolloutClient
from staleflow.clients.rollout.samples import Sample
from staleflow.clients.stage.client import AsyncStageClient
from staleflow.clients.trainer.async_client import AsyncTrainerClient
from staleflow.clients.weights import PulledVersion, external
from tests.servers.running import Run, eventually

STEPS = 3
SAMPLE = Sample(token_ids=[4, 5], logprobs=[-0.5, -0.25])


async def generate(client: AsyncRolloutClient) -> None:
    async for lease in client.leases():
        await client.push(lease, [1, 2, 3], [SAMPLE] * lease.group_size)


async def judge(client: AsyncStageClient) -> None:
    async for work in client.groups():
        await client.put(work, {"reward": [0.0, 1.0]})


async def _has(rollout: AsyncRolloutClient, version: int) -> bool:
    return rollout.version == version


async def test_weights_may_move_the_users_own_way_and_readers_learn_which(short_dir: Path) -> None:
    store = {f"sha-{version}": [float(version)] for version in range(STEPS + 1)}  # stands for a shared file system
    loaded: list[tuple[int, list[float]]] = []

    def load(weights: PulledVersion) -> None:
        assert weights.external is not None
        loaded.append((weights.version, store[weights.external]))

    run = Run(short_dir)
    try:
        run.scheduler()
        run.trajectories()
        run.parameters()
        address = run.where.scheduler
        async with AsyncTrainerClient(address) as trainer, asyncio.timeout(60):
            assert (await trainer.join(0, 0)).version == -1  # type: ignore[arg-type]
            await trainer.publish_initial(external("sha-0"))
            async with (
                AsyncRolloutClient(address, load, name="foreign") as rollout,
                AsyncStageClient(address, "reward", name="judge") as stage,
            ):
                working = [asyncio.ensure_future(work) for work in (generate(rollout), judge(stage))]
                async for batch in trainer.batches(STEPS):
                    assert len(batch.rewards) == 4
                    assert await trainer.commit_external(f"sha-{batch.step + 1}") == batch.step + 1
                assert trainer.version == STEPS
                await eventually(lambda: _has(rollout, STEPS))
                for task in working:
                    task.cancel()
                await asyncio.gather(*working, return_exceptions=True)
            await trainer.finished()
    finally:
        await run.close()
    assert loaded[-1] == (STEPS, [float(STEPS)])
    assert all(weights == [float(version)] for version, weights in loaded)
    assert staleflow.Trace.open(short_dir).check().ok


async def test_a_digest_that_cannot_be_sent_is_refused() -> None:
    for digest in ("", "x" * 1025):
        with pytest.raises(ValueError, match=f"digest has {len(digest)} bytes; it must have 1 to 1024"):
            external(digest)


async def test_a_cancelled_wait_for_a_batch_ends_the_client(short_dir: Path) -> None:
    run = Run(short_dir)
    try:
        run.scheduler()
        run.trajectories()
        run.parameters()
        async with AsyncTrainerClient(run.where.scheduler) as trainer, asyncio.timeout(60):
            await trainer.join(0, 0)  # type: ignore[arg-type]
            await trainer.publish_initial(external("sha-0"))
            batches = trainer.batches(1)
            waiting = asyncio.ensure_future(anext(batches))
            await asyncio.sleep(0.2)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert [batch async for batch in trainer.batches(1)] == []
            with pytest.raises(RuntimeError, match="there is no batch to commit"):
                await trainer.commit_external("sha-1")
    finally:
        await run.close()
