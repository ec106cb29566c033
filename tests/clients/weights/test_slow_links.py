"""Data too large to pass a connection before the peer seems dead still arrives, in smaller portions."""

import asyncio
from collections.abc import Callable, Sequence
from typing import ClassVar

import msgspec
import numpy as np
import pytest

from staleflow.clients.rollout.groups import Recipe
from staleflow.clients.rollout.pushes import Pusher
from staleflow.clients.rollout.transfers import MAX_ROWS_BYTES, fetch_rows
from staleflow.clients.stage import worker as stage_worker
from staleflow.clients.stage.worker import StageGroup, StageOutcome
from staleflow.clients.stage.worker import StageWorker as ShippedStageWorker
from staleflow.clients.trainer.data.fetch import Fetcher
from staleflow.clients.weights import Publisher, Puller, mapped
from staleflow.clients.weights import local_upload as written
from staleflow.net.adaptive_chunks import AdaptiveChunk
from staleflow.net.client import Client
from staleflow.protocols.consistency.ids import Lineage, Version, WorkerId
from staleflow.protocols.wire.messages import Assign, Done, PartialFrames, PutPartial, Result
from staleflow.protocols.wire.partial_samples import partial_sha
from staleflow.protocols.wire.tensors import specs_and_frames
from tests.servers.running import WEIGHTS, Rollout, Run, StageWorker, Trainer, payload
from tests.servers.slow_link import slow_link

SLOW = 0.8e6
"""Bytes a second: a chunk of the largest size takes more than five seconds."""
LARGE = {"w": np.random.default_rng(0).random(1 << 20, dtype=np.float32)}
"""One chunk of the largest size."""
GROUPS, TOKENS = 8, 28_000
"""Groups of half a megabyte each; together they take five seconds."""
WITHIN_S = 120.0


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put clients on another host than the servers."""
    for module in (mapped, written, stage_worker):
        monkeypatch.setattr(module, "boot_id", lambda: "another host")


async def test_a_version_comes_over_a_slow_link(run: Run) -> None:
    trainer = await run.trainer()
    await trainer.publish(0, LARGE)
    async with slow_link(run.where.parameters, SLOW) as link, asyncio.timeout(WITHIN_S):
        puller = Puller(link.address, worker=WorkerId("reader.1"))
        run.clients.append(puller)
        async with await puller.pull(Lineage(0), Version(0)) as pulled:
            assert pulled.arrays()["w"].tobytes() == LARGE["w"].tobytes()


async def test_a_version_is_published_over_a_slow_link(run: Run) -> None:
    trainer = await run.trainer()
    async with slow_link(run.where.parameters, SLOW) as link, asyncio.timeout(WITHIN_S):
        trainer.publisher = Publisher(link.address, worker=trainer.worker)
        run.clients.append(trainer.publisher)
        assert (await trainer.publish(0, LARGE)).version == 0


async def begun(make_run: Callable[..., Run]) -> tuple[Run, Trainer, Rollout]:
    """A run whose batch is ``GROUPS``, with a trainer and a worker."""
    run = make_run(trainer={"batch_size": GROUPS})
    run.scheduler()
    run.trajectories()
    run.parameters()
    trainer = await run.trainer()
    await trainer.publish(0, WEIGHTS)
    return run, trainer, await run.rollout(capacity=GROUPS)


async def pushed(shard: Client, rollout: Rollout, assigns: Sequence[Assign]) -> list[Result]:
    """Push through the shipped class, with all groups queued at once."""
    results: list[Result] = []
    pusher = Pusher(shard, rollout.worker, lambda _, result: results.append(result))
    for assign in assigns:
        pusher.put(assign, payload(assign.version, seed=assign.group, tokens=TOKENS))
    running = asyncio.create_task(pusher.run())
    await pusher.idle.wait()
    running.cancel()
    return results


async def test_groups_are_pushed_over_a_slow_link(make_run: Callable[..., Run]) -> None:
    run, _, rollout = await begun(make_run)
    assigns = (await rollout.leases(GROUPS))[:GROUPS]
    async with slow_link(run.where.trajectories[0], SLOW) as link, asyncio.timeout(WITHIN_S):
        results = await pushed(run.client(link.address, rollout.worker), rollout, assigns)
    assert [result.code for result in results] == [None] * GROUPS


async def test_groups_are_fetched_over_a_slow_link(make_run: Callable[..., Run]) -> None:
    run, trainer, rollout = await begun(make_run)
    await pushed(rollout.shards[0], rollout, (await rollout.leases(GROUPS))[:GROUPS])
    stage, done = StageWorker(run), 0
    while done < GROUPS:
        items, _ = await stage.take()
        await stage.finish(items)
        done += len(items)
    members = (await trainer.next_batch(0)).members
    async with slow_link(run.where.trajectories[0], SLOW) as link, asyncio.timeout(WITHIN_S):
        shard = run.client(link.address, trainer.worker)
        fetched = await Fetcher([shard], mapped=False).members(members)
    for member, group in zip(members, fetched, strict=True):
        written = payload(member.version, seed=member.group, tokens=TOKENS)
        assert np.array_equal(group.payload.token_ids, written.token_ids)


class Judge:
    """Check that groups arrive unchanged and score half of the samples as right."""

    together: ClassVar[bool] = False

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.all = asyncio.Event()

    async def make(self, groups: Sequence[StageGroup]) -> Sequence[StageOutcome]:
        for group in groups:
            written = payload(int(group.payload.segments[0, 2]), seed=group.group, tokens=TOKENS)
            assert np.array_equal(group.payload.token_ids, written.token_ids)
        return [{"reward": np.asarray([0.0, 1.0], np.float32)}] * len(groups)

    async def accepted(self, groups: Sequence[StageGroup]) -> None:
        self.seen += [group.group for group in groups]
        if len(self.seen) == GROUPS:
            self.all.set()


async def test_a_stage_takes_groups_over_a_slow_link(make_run: Callable[..., Run]) -> None:
    run, _, rollout = await begun(make_run)
    assigns = (await rollout.leases(GROUPS))[:GROUPS]
    await pushed(rollout.shards[0], rollout, assigns)
    async with slow_link(run.where.trajectories[0], SLOW) as link, asyncio.timeout(WITHIN_S):
        me, judge = WorkerId("reward-0.1"), Judge()
        shipped = ShippedStageWorker(worker=me, name="reward", stage=judge, max_groups=GROUPS)
        working = asyncio.create_task(shipped.serve([run.client(link.address, me)]))
        await judge.all.wait()
        working.cancel()
    assert sorted(judge.seen) == sorted(assign.group for assign in assigns)


async def test_groups_that_move_arrive_over_a_slow_link(make_run: Callable[..., Run]) -> None:
    run, _, rollout = await begun(make_run)
    moved: list[Assign] = []
    for assign in (await rollout.leases(GROUPS))[:GROUPS]:
        specs, frames = specs_and_frames(payload(assign.version, seed=assign.group, tokens=TOKENS).to_arrays())
        partial = PartialFrames(origin=assign.lease, frames=specs)
        put = PutPartial(group=assign.group, lease=assign.lease, partial=partial)
        assert await rollout.shards[0].ask(put, Done, frames) == Done()
        moved.append(msgspec.structs.replace(assign, partial=assign.lease, partial_sha=partial_sha(partial, frames)))
    async with slow_link(run.where.trajectories[0], SLOW) as link, asyncio.timeout(WITHIN_S):
        rows, came = await fetch_rows(
            run.client(link.address, rollout.worker), AdaptiveChunk(MAX_ROWS_BYTES), moved, Recipe.of(run.config)
        )
    assert [row["prompt"] for row in rows] == [f"{assign.group} + 1" for assign in moved]
    for assign in moved:
        written = payload(assign.version, seed=assign.group, tokens=TOKENS)
        assert np.array_equal(came[assign.lease].payload.token_ids, written.token_ids)
