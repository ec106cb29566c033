"""What is too large to pass a connection before its client believes it dead comes all the same, in smaller portions."""

import asyncio
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from staleflow.clients.parameters import Publisher, Puller, mapped
from staleflow.clients.rollout.pushes import Pusher
from staleflow.clients.trainer.fetching import Fetcher
from staleflow.protocols.consistency.ids import Lineage, Version, WorkerId
from staleflow.protocols.wire.messages import Assign, Result
from staleflow.runtime.client import Client
from tests.servers.running import WEIGHTS, Rollout, Run, StageWorker, Trainer, payload
from tests.servers.slow_link import slow_link

SLOW = 0.8e6
"""Bytes a second: a chunk of the largest size takes more than five seconds."""
LARGE = {"w": np.random.default_rng(0).random(1 << 20, dtype=np.float32)}
"""One such chunk."""
GROUPS, TOKENS = 8, 28_000
"""Of half a megabyte each, all of which take five seconds."""
WITHIN_S = 40.0


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients are on another host than the servers."""
    monkeypatch.setattr(mapped, "boot_id", lambda: "another host")


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
    """Through the shipped class, all of them waiting at once."""
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
