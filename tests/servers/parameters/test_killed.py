"""A version is either whole or absent after a parameter server is killed during its upload."""

import asyncio
import random
import shutil
from collections.abc import Callable

import numpy as np
import pytest

from staleflow.clients.weights import Puller
from staleflow.net.errors import Refused
from staleflow.protocols.consistency.ids import Lineage, Version, WorkerId
from staleflow.protocols.wire.messages import BeginPublish, BeginPublishReply, Done, PublishChunk
from staleflow.servers.parameters.versions import Versions
from tests.servers.parameters.test_service import BYTES, begin, files, versions
from tests.servers.running import Run

MILLION: dict[str, np.ndarray] = {"w": np.random.default_rng(0).random(1_000_000, dtype=np.float32)}


async def test_half_a_version_is_gone_after_a_kill(make_run: Callable[..., Run]) -> None:
    run = make_run()
    run.scheduler()
    run.process("parameters")
    trainer = await run.trainer()
    client = run.client(run.where.parameters, trainer.worker)
    ask: BeginPublish = begin(trainer)
    to = await client.ask(ask, BeginPublishReply)
    await client.ask(PublishChunk(upload=to.upload, offset=0), Done, [BYTES[:200]])
    run.kill("parameters")
    run.process("parameters")
    assert await versions(run) == {}
    with pytest.raises(Refused, match="begin again"):
        await client.ask(PublishChunk(upload=to.upload, offset=200), Done, [BYTES[200:]])
    assert files(run) == set()


async def test_a_version_is_whole_or_absent_whenever_the_server_dies(make_run: Callable[..., Run]) -> None:
    run = make_run()
    run.scheduler()
    run.process("parameters")
    trainer = await run.trainer()
    await versions(run)  # the server is running
    publishing = asyncio.create_task(trainer.publish(0, MILLION))
    async with asyncio.timeout(20):
        while not list((run.run_dir / "parameters").glob("upload-*")):  # noqa: ASYNC110
            await asyncio.sleep(0)  # the first kill happens during the upload, however fast the upload is
    puller = Puller(run.where.parameters, worker=WorkerId("reader.1"))
    seed = 3
    delays = random.Random(seed)
    for kill in range(4):
        run.kill("parameters")
        if kill == 0:
            assert not publishing.done(), "void: the version was there before the first kill"
        left = shutil.copytree(run.run_dir / "parameters", run.run_dir / f"left-{kill}")
        run.process("parameters")
        there = Versions(left, durability="process")
        for stored in there.stored.values():
            there.verify(stored, doubted=True)
        await versions(run)
        await asyncio.sleep(delays.random() * 0.04)
    assert (await publishing).version == 0
    async with await puller.pull(Lineage(0), Version(0)) as pulled:
        np.testing.assert_array_equal(pulled.arrays()["w"], MILLION["w"])
    puller.close()


async def test_a_published_version_is_served_again_after_a_kill(make_run: Callable[..., Run]) -> None:
    run = make_run()
    run.scheduler()
    run.process("parameters")
    trainer = await run.trainer()
    await trainer.publish(0, MILLION)
    run.kill("parameters")
    run.process("parameters")
    puller = Puller(run.where.parameters, worker=WorkerId("reader.1"))
    async with await puller.pull(Lineage(0), Version(0)) as pulled:
        np.testing.assert_array_equal(pulled.arrays()["w"], MILLION["w"])
    puller.close()


async def test_a_version_that_was_durable_but_not_registered_is_registered_after_a_kill(
    make_run: Callable[..., Run],
) -> None:
    run = make_run()
    run.scheduler()
    run.process("parameters")
    trainer = await run.trainer()
    await run.client(run.where.parameters, trainer.worker).ask(
        begin(trainer), BeginPublishReply
    )  # the server has looked up the trainer's term
    await run.stop("scheduler")
    publishing = asyncio.create_task(trainer.publish(0, MILLION))
    async with asyncio.timeout(20):
        while not (run.run_dir / "parameters" / "0-0.json").exists():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    publishing.cancel()
    run.kill("parameters")
    run.scheduler()
    run.process("parameters")
    puller = Puller(run.where.parameters, worker=WorkerId("reader.1"))
    async with await puller.pull(Lineage(0), Version(0)) as pulled:
        np.testing.assert_array_equal(pulled.arrays()["w"], MILLION["w"])
    puller.close()
