"""A rollout worker plays evaluations beside its leases, with one version from the first token to the last."""

import asyncio
import json
import threading
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from staleflow.clients.evaluation.evaluator import Evaluator
from staleflow.clients.rollout.engines.base import Trajectory
from staleflow.clients.rollout.engines.simulated import SimulatedEngine
from staleflow.clients.rollout.engines.thread import EngineThread
from staleflow.clients.rollout.groups import Recipe
from staleflow.clients.rollout.main import text_bytes
from staleflow.clients.rollout.worker import Worker
from staleflow.clients.texts import ids_as_text
from staleflow.configs.loading.prompt_rows import open_eval_set
from staleflow.configs.schema import Config
from staleflow.configs.simulation import Simulated
from staleflow.net.endpoint import Call
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.consistency.ids import Lineage, Version
from staleflow.protocols.wire.messages import Done, EndEvaluation, Evaluate, PromptScores, PutScores
from tests.clients.rollout.engines.waiting import until
from tests.clients.rollout.peers import Scheduler, Stage, assign, pull

REWARDS = Path(__file__).parent.parent / "user_code" / "rewards.py"
PROMPTS = 3


class Gated(SimulatedEngine):
    """An engine that stands still while the gate is closed."""

    def __init__(self) -> None:
        super().__init__(Simulated(mean_tokens=8, sigma=0.3, k2=1e-4), slots=16)
        self.gate = threading.Event()
        self.gate.set()

    def step(self) -> list[Trajectory]:
        assert self.gate.wait(timeout=30)
        return super().step()


class Recording(Scheduler):
    """The scheduler of the script, which takes scores as well."""

    def __init__(self) -> None:
        super().__init__()
        self.put: list[PutScores] = []
        self.refuses = False

    def hear(self, call: Call) -> None:
        if not isinstance(call.body, PutScores):
            super().hear(call)
        elif self.refuses:
            call.refuse(Code.STALE_LEASE, "said the test")
        else:
            self.put.append(call.body)
            call.reply(Done())

    @property
    def scores(self) -> list[PromptScores]:
        return sorted((one for put in self.put for one in put.scores), key=lambda one: one.prompt)


class Play:
    def __init__(self, stage: Stage, scheduler: Recording, engine: Gated, evaluator: Evaluator) -> None:
        self.stage, self.scheduler, self.engine, self.evaluator = stage, scheduler, engine, evaluator

    def order(self, ticket: int, version: int, prompts: tuple[int, ...] = (0, 1, 2)) -> None:
        command = Evaluate(
            ticket=ticket, set="sums", lineage=Lineage(0), version=Version(version), prompts=list(prompts)
        )
        self.scheduler.order(command)

    async def reported(self, **values: Any) -> None:
        await until(lambda: self.scheduler.reports and _has(self.scheduler.reports[-1], values))


def _has(report: Any, values: dict[str, Any]) -> bool:
    return all(getattr(report, name, getattr(report.stats, name, None)) == value for name, value in values.items())


@asynccontextmanager
async def playing(folder: Path, reward: str = "length") -> AsyncGenerator[Play]:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{number}="}) + "\n" for number in range(PROMPTS)))
    table = {
        "prompts": {"source": "somewhere:prompts"},
        "reward": {"run": f"{REWARDS}:{reward}", "retries": 0},
        "rollout": {"max_new_tokens": 10_000, "group_size": 4},
        "eval": [{"name": "sums", "path": str(path), "samples": 2, "temperature": 1.0}],
    }
    config = msgspec.convert(table, Config)
    scheduler = Recording()
    stage = Stage(folder, scheduler=scheduler)
    engine = Gated()
    runner = EngineThread(engine)
    rows = [open_eval_set(config.eval[0], config.prompts, 0, seed=0)]
    evaluator = Evaluator(config, stage.me, stage.clients[0], runner, text_bytes, ids_as_text, None, rows)
    shards = [stage.clients[1]]
    recipe = Recipe.of(config)
    worker = Worker(stage.me, stage.clients[0], shards, stage.weights, runner, text_bytes, recipe, evaluator=evaluator)
    serving = [asyncio.ensure_future(endpoint.serve()) for endpoint in stage.endpoints]
    running = asyncio.ensure_future(worker.run())
    scheduler.order(pull(0))
    try:
        yield Play(stage, scheduler, engine, evaluator)
        assert not running.done(), running
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
        engine.gate.set()
        await worker.leave("the test is over")
        await runner.close()
        stage.close()
        await asyncio.gather(*serving)


async def test_an_evaluation_is_played_beside_the_groups_of_leases(short_dir: Path) -> None:
    async with playing(short_dir) as play:
        await play.reported(version=0)
        play.scheduler.order(assign(1))
        play.order(7, 0)
        await until(lambda: len(play.scheduler.scores) == PROMPTS)
        await until(lambda: len(play.stage.shard.payloads) == 1)
        assert [(one.prompt, len(one.rewards), one.failed) for one in play.scheduler.scores] == [
            *((0, 2, 0), (1, 2, 0), (2, 2, 0))
        ]
        assert {put.ticket for put in play.scheduler.put} == {7}
        tokens = sum(length for one in play.scheduler.scores for length in one.lengths)
        await play.reported(evaluation=0, evaluated_tokens=tokens)


async def test_newer_weights_are_loaded_after_the_evaluation(short_dir: Path) -> None:
    async with playing(short_dir) as play:
        await play.reported(version=0)
        play.engine.gate.clear()
        play.order(7, 0)
        await until(lambda: play.engine.stats().running + play.engine.stats().waiting > 0)
        play.scheduler.order(pull(1))
        await until(lambda: play.stage.weights.given == [0, 1])
        play.engine.gate.set()
        await until(lambda: len(play.scheduler.scores) == PROMPTS)
        await play.reported(version=1)
        assert [put.failure for put in play.scheduler.put] == [""] * len(play.scheduler.put)


async def test_the_evaluation_waits_until_its_version_is_loaded(short_dir: Path) -> None:
    async with playing(short_dir) as play:
        play.scheduler.order(pull(2))
        play.order(7, 2)
        await until(lambda: len(play.scheduler.scores) == PROMPTS)
        await play.reported(version=2)


async def test_a_version_that_is_not_ordered_is_a_failure(short_dir: Path) -> None:
    async with playing(short_dir) as play:
        await play.reported(version=0)
        play.order(7, 5)
        await until(lambda: play.scheduler.put)
        (put,) = play.scheduler.put
        assert (put.scores, put.failure) == ([], "version 5 is not loaded")
        await play.reported(evaluation=0)


async def test_a_reward_that_cannot_be_loaded_is_a_failure_of_the_evaluation_alone(short_dir: Path) -> None:
    async with playing(short_dir, reward="no_such_function") as play:
        await play.reported(version=0)
        play.order(7, 0)
        await until(lambda: play.scheduler.put)
        assert "no_such_function" in play.scheduler.put[-1].failure
        play.scheduler.order(assign(1))
        await until(lambda: len(play.stage.shard.payloads) == 1)


async def test_a_newer_evaluation_replaces_the_one_in_progress(short_dir: Path) -> None:
    async with playing(short_dir) as play:
        await play.reported(version=0)
        play.engine.gate.clear()
        play.order(7, 0)
        await play.reported(evaluation=7)
        play.order(8, 0, (1,))
        await play.reported(evaluation=8)
        play.engine.gate.set()
        await until(lambda: play.scheduler.put)
        await play.reported(evaluation=0)
        sent = [(put.ticket, one.prompt) for put in play.scheduler.put for one in put.scores]
        assert sent == [(8, 1)]


@pytest.mark.parametrize("how", ["ended", "refused"])
async def test_an_evaluation_that_is_over_leaves_the_engine_to_the_groups(short_dir: Path, how: str) -> None:
    async with playing(short_dir) as play:
        await play.reported(version=0)
        play.engine.gate.clear()
        play.order(7, 0)
        await play.reported(evaluation=7)
        play.scheduler.refuses = how == "refused"
        if how == "ended":
            play.scheduler.order(EndEvaluation(ticket=6), EndEvaluation(ticket=7))
            await play.reported(evaluation=0)
        play.scheduler.order(pull(1))
        play.engine.gate.set()
        await play.reported(evaluation=0, version=1)
        assert play.scheduler.put == []
        play.scheduler.order(assign(1, version=1))
        await until(lambda: len(play.stage.shard.payloads) == 1)
