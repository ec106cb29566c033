"""A failure in an environment costs the worker one group, reported by name, and the worker continues."""

import asyncio
import re
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import msgspec
import pytest

from staleflow.clients.rollout.engines.base import Sampling
from staleflow.clients.rollout.engines.simulated import SimulatedEngine
from staleflow.clients.rollout.engines.thread import EngineThread
from staleflow.clients.rollout.episodes.chat.template import ByteChatTemplate
from staleflow.clients.rollout.episodes.environment import Environments
from staleflow.clients.rollout.groups import Recipe
from staleflow.clients.rollout.main import text_bytes
from staleflow.clients.rollout.worker import Worker
from staleflow.configs.schema import Config, Environment, Prompts, Reward
from staleflow.configs.simulation import Simulated
from staleflow.protocols.consistency.effects import ReleaseWhy
from staleflow.protocols.consistency.ids import LeaseId
from staleflow.protocols.wire.messages import Abort, Interrupt, Yield
from tests.clients.rollout.engines.waiting import until
from tests.clients.rollout.peers import Stage, assign, pull

FILE = Path(__file__).parent / "environments.py"


@pytest.fixture
def config() -> Config:
    environment = Environment(run=f"{FILE}:Bad", timeout_s=60.0, memory_mb=1024)
    return Config(prompts=Prompts(path="p.jsonl"), reward=Reward(run=""), environment=environment)


@asynccontextmanager
async def working(short_dir: Path, config: Config) -> AsyncGenerator[Stage]:
    """Run a worker with the environment of ``config``, and its peers."""
    stage = Stage(short_dir)
    runner = EngineThread(SimulatedEngine(Simulated(mean_tokens=8, sigma=0.3, k2=1e-4), slots=16))
    recipe = Recipe(group_size=2, started=3, sampling=Sampling(max_new_tokens=10_000), seed=3)
    environments = Environments(config, runner, ByteChatTemplate(), recipe)
    await environments.start()
    worker = Worker(
        stage.me, stage.clients[0], [stage.clients[1]], stage.weights, runner, text_bytes, recipe, environments
    )
    serving = [asyncio.ensure_future(endpoint.serve()) for endpoint in stage.endpoints]
    running = asyncio.ensure_future(worker.run())
    try:
        yield stage
        assert not running.done()
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
        await worker.leave("the test is over")
        await environments.close()
        await runner.close()
        stage.close()
        await asyncio.gather(*serving)


async def test_bad_episodes_give_their_leases_back_and_good_ones_are_pushed(short_dir: Path, config: Config) -> None:
    async with working(short_dir, config) as stage:
        scheduler, shard = stage.scheduler, stage.shard
        prompts = {1: "raise", 2: "good", 3: "exit", 5: "hang", 6: "text"}
        shard.rows = {group: {"prompt": prompt} for group, prompt in prompts.items()} | {8: {"prompt": "good"}}
        scheduler.order(pull(0), assign(1), assign(2))
        await until(lambda: len(scheduler.released) == 1 and 2 in shard.payloads)
        scheduler.order(assign(3))
        await until(lambda: len(scheduler.released) == 2)
        scheduler.order(assign(5), assign(6), Abort(lease=LeaseId(5)))
        await until(lambda: len(scheduler.released) == 3)
        scheduler.order(assign(8), Yield(lease=LeaseId(8)), Interrupt(lease=LeaseId(8)))  # episodes do not move
        await until(lambda: 8 in shard.payloads)
        assert shard.truncated == {2: False, 8: True}
        await until(lambda: scheduler.held == [])
        assert scheduler.yielded == []
        assert {(op.why, op.hopeless) for op in scheduler.released} == {(ReleaseWhy.ABORTED, False)}
        assert {op.group: re.sub(r"\.py:\d+$", ".py:LINE", op.detail) for op in scheduler.released} == {
            1: f"group 1: at {stage.me}, the environment raised ValueError: no such planet, at environments.py:LINE",
            3: f"group 3: at {stage.me}, the environment's process ended with code 7",
            6: f"group 6: at {stage.me}, the environment returned 'good'; it must return None, a finite number, "
            "or finite numbers by name",
        }
        assert shard.payloads[2].stages["stage/environment/reward"].tolist() == [1.0, 1.0]


async def test_an_episode_that_takes_too_long_gives_its_lease_back(short_dir: Path, config: Config) -> None:
    brief = msgspec.structs.replace(config.environment, timeout_s=1.0)
    async with working(short_dir, msgspec.structs.replace(config, environment=brief)) as stage:
        stage.shard.rows = {1: {"prompt": "hang"}}
        stage.scheduler.order(pull(0), assign(1))
        await until(lambda: stage.scheduler.released)
        await until(lambda: stage.scheduler.held == [])
        (op,) = stage.scheduler.released
        assert (op.why, op.hopeless) == (ReleaseWhy.ABORTED, False)
        assert op.detail == f"group 1: at {stage.me}, the environment took longer than 1 s"


async def test_reports_tell_how_many_episodes_play_and_how_many_wait_for_a_process(
    short_dir: Path, config: Config
) -> None:
    few = msgspec.structs.replace(config.environment, processes=2, concurrency=2)
    async with working(short_dir, msgspec.structs.replace(config, environment=few)) as stage:
        scheduler = stage.scheduler
        stage.shard.rows = {group: {"prompt": "hang"} for group in (1, 2)}
        scheduler.order(pull(0), assign(1), assign(2))

        def newest() -> list[tuple[int, int]]:
            return [(report.stats.episodes, report.stats.episodes_waiting) for report in scheduler.reports[-1:]]

        await until(lambda: newest() == [(4, 2)])
        scheduler.order(Abort(lease=LeaseId(1)))
        await until(lambda: newest() == [(3, 0)])
