"""A shard runs independent stages of a graph side by side, and starts no stage too late for its group."""

import asyncio
import json
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest

from staleflow.configs.schema import Config, Prompts, Reward, Stage
from staleflow.configs.stages import graph
from staleflow.net.client import Client, worker_id
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.consistency.ids import GroupId, LeaseId, WorkerId
from staleflow.protocols.wire.messages import (
    Attach,
    AttachReply,
    GetGroups,
    Groups,
    Op,
    Operations,
    PushItem,
    RegisterPush,
    RegisterRelease,
    Result,
    Results,
    StageItem,
)
from staleflow.protocols.wire.tensors import Array, arrays, specs_and_frames
from staleflow.servers.trajectories.filters import FILTERS
from staleflow.servers.trajectories.records import parse_push
from staleflow.servers.trajectories.registrar import Registrar
from staleflow.servers.trajectories.shard import Shard
from staleflow.servers.trajectories.stage_queue import HOLD_AFTER
from staleflow.servers.trajectories.stage_reports import loads_of
from staleflow.servers.trajectories.stage_times import path_of
from staleflow.servers.trajectories.store import TABLES, Columns, TrajectoryStore
from staleflow.store.memory import MemoryStore
from tests.servers.running import GROUP_SIZE, WEIGHTS, Run, StageWorker, eventually, payload

TOKENS = 5 * GROUP_SIZE
LEFT, RIGHT = np.asarray([1.0, 2.0], np.float32), np.linspace(-1, 1, TOKENS, dtype=np.float32)
TOTAL = np.asarray([3.0, 4.0], np.float32)
COLUMNS: dict[str, dict[str, Array]] = {
    "reward": {"reward": np.asarray([0.0, 1.0], np.float32)},
    "left": {"score": LEFT},
    "right": {"values:token": RIGHT},
    "mix": {"total": TOTAL},
}
DIAMOND: list[dict[str, Any]] = [
    {"name": "left", "run": "m:f", "makes": ["score"]},
    {"name": "right", "run": "m:f", "makes": ["values:token"]},
    {"name": "mix", "run": "m:f", "needs": ["left/score", "right/values", "reward/reward"], "makes": ["total"]},
]


@pytest.fixture
async def run(make_run: Callable[..., Run]) -> Run:
    """A run with stages reward, left and right from the start, and mix after all of them."""
    run = make_run(stage=DIAMOND)
    run.scheduler()
    run.trajectories()
    run.parameters()
    return run


async def pushed(run: Run, count: int = 2) -> None:
    trainer = await run.trainer()
    await trainer.publish(0, WEIGHTS)
    rollout = await run.rollout()
    await rollout.push(*(await rollout.leases(count))[:count])


async def totals(run: Run) -> dict[str, Any]:
    found: dict[str, Any] = (await run.status(run.where.scheduler))["totals"]
    return found


async def waiting(run: Run) -> dict[str, int]:
    """Number of groups that wait for each stage or are in it."""
    status = await run.status(run.where.trajectories[0])
    return {stage: queue["waiting"] + queue["taken"] for stage, queue in status["queues"].items()}


async def judged(run: Run, stage: str, name: str = "") -> list[GroupId]:
    """Finish every group that waits for one stage."""
    worker = StageWorker(run, name or f"{stage}-0", stage=stage)
    items, _ = await worker.take()
    assert {result.code for result in await worker.give(items, COLUMNS[stage])} == {None}
    return [item.group for item in items]


def seen(items: list[StageItem], frames: list[memoryview]) -> dict[str, Array]:
    """Stage columns of the first group of a reply."""
    found = arrays(items[0].frames, frames[: len(items[0].frames)])
    return {name: array for name, array in found.items() if name.startswith("stage/")}


async def test_stages_that_need_nothing_of_each_other_have_a_group_at_the_same_time(run: Run) -> None:
    await pushed(run)
    assert await waiting(run) == {"reward": 2, "left": 2, "right": 2, "mix": 0}
    workers = {stage: StageWorker(run, f"{stage}-0", stage=stage) for stage in ("reward", "left", "right")}
    taken = {stage: await worker.take() for stage, worker in workers.items()}
    groups = [[item.group for item in items] for items, _ in taken.values()]
    assert groups[0] == groups[1] == groups[2]
    assert [seen(*answer) for answer in taken.values()] == [{}, {}, {}]
    for stage, worker in workers.items():
        assert await StageWorker(run, "mix-0", stage="mix").take(wait_ms=50) == ([], [])
        await worker.give(taken[stage][0], COLUMNS[stage])
    items, frames = await (mix := StageWorker(run, "mix-1", stage="mix")).take()
    assert {name: column.tolist() for name, column in seen(items, frames).items()} == {
        "stage/left/score": LEFT.tolist(),
        "stage/right/values:token": RIGHT.tolist(),
        "stage/reward/reward": [0.0, 1.0],
    }
    await mix.give(items, COLUMNS["mix"])

    async def occupied() -> bool:
        return bool((await totals(run))["occupies"] == 2)

    assert await eventually(occupied)
    lines = [json.loads(line) for line in path_of(run.run_dir, 0).read_text().splitlines()]
    assert [(line["stage"], line["groups"], line["begin_s"] <= line["end_s"]) for line in lines] == [
        (stage, 2, True) for stage in ("reward", "left", "right", "mix")
    ]
    batch = await (trainer := await run.trainer("other")).next_batch(0)
    fetch = GetGroups(groups=[m.group for m in batch.members], shas=[m.sha for m in batch.members])
    answer, frames = await run.shard(trainer.worker).call(fetch)
    assert isinstance(answer, Groups)
    found = arrays(answer.groups[0].frames, frames[: len(answer.groups[0].frames)])
    assert sorted(name for name in found if name.startswith("stage/")) == [
        "stage/left/score",
        "stage/mix/total",
        "stage/reward/reward",
        "stage/right/values:token",
    ]


async def test_what_the_filter_does_not_want_leaves_the_other_stages_too(run: Run) -> None:
    await pushed(run)
    left, reward = StageWorker(run, "left-0", stage="left"), StageWorker(run)
    late, _ = await left.take()
    items, _ = await reward.take()
    await reward.give(items, {"reward": np.asarray([0.5, 0.5], np.float32)})
    assert await waiting(run) == {"reward": 0, "left": 0, "right": 0, "mix": 0}
    assert {r.code for r in await left.give(late, COLUMNS["left"])} == {Code.STALE_LEASE}

    async def filtered() -> bool:
        return bool((await totals(run))["releases"] == {"filtered": 2})

    assert await eventually(filtered)


async def test_a_group_that_two_stages_give_up_is_released_once(run: Run) -> None:
    await pushed(run, count=1)
    left, again, right = (StageWorker(run, name, stage=name[:-2]) for name in ("left-0", "left-1", "right-0"))
    (other,), _ = await right.take()
    for worker in (left, again):
        (lost,), _ = await worker.take()
        assert [r.code for r in await worker.fail(lost, "raised")] == [None]
    assert [r.code for r in await right.fail(other, "raised")] == [Code.STALE_LEASE]

    async def aborted() -> bool:
        return bool((await totals(run))["releases"] == {"aborted": 1})

    assert await eventually(aborted)
    assert await waiting(run) == {"reward": 0, "left": 0, "right": 0, "mix": 0}


async def test_after_a_restart_a_group_is_in_the_stages_that_are_still_to_come(run: Run) -> None:
    await pushed(run)
    await judged(run, "left")
    await judged(run, "reward")
    await run.stop("trajectories-0")
    run.trajectories()

    async def taken_up() -> bool:
        return await waiting(run) == {"reward": 0, "left": 0, "right": 2, "mix": 0}

    assert await eventually(taken_up)
    await judged(run, "right", "right-1")
    assert await waiting(run) == {"reward": 0, "left": 0, "right": 0, "mix": 2}


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ({"score": LEFT[:1]}, "stage/left/score is float32[1]; it must be float32[2], one value a sample"),
        ({"score": LEFT, "more": LEFT}, "the stage makes stage/left/more, which is not one of stage/left/score"),
        ({"total": LEFT}, "the stage must make stage/left/score"),
        ({"score:token": RIGHT}, "the stage must make stage/left/score"),
    ],
)
async def test_columns_that_a_stage_does_not_declare_are_refused_by_name(
    run: Run, columns: dict[str, Array], says: str
) -> None:
    await pushed(run, count=1)
    left = StageWorker(run, "left-0", stage="left")
    items, _ = await left.take()
    (answer,) = await left.give(items, columns)
    assert answer.code is Code.MALFORMED
    assert says in answer.detail


async def test_a_column_of_a_value_a_token_has_as_many_as_the_group_has_tokens(run: Run) -> None:
    await pushed(run, count=1)
    right = StageWorker(run, "right-0", stage="right")
    items, _ = await right.take()
    (answer,) = await right.give(items, {"values:token": LEFT})
    assert (answer.code, answer.detail) == (
        Code.MALFORMED,
        "stage/right/values:token is float32[2]; it must be float32[10], one value a completion token",
    )


async def test_why_names_the_stage_that_groups_wait_in_and_how_many_workers_it_has(run: Run) -> None:
    for stage in ("reward", "left", "left", "right", "mix"):
        worker = worker_id(f"{stage}-{len(run.clients)}")
        hello = Attach(worker=worker, name=f"{stage}-{len(run.clients)}", role="stage", stage=stage)
        await run.client(run.where.scheduler, worker).ask(hello, AttachReply)
    await pushed(run)
    await judged(run, "right")
    await judged(run, "reward")
    await StageWorker(run, "left-0", stage="left").take(most=1)
    said = "are in stages; 1 wait for the stage left (2 workers, 1 in work)"

    async def named() -> bool:
        return str((await run.status(run.where.scheduler))["why"]).endswith(said)

    assert await eventually(named)
    rows = {row["stage"]: row for row in (await run.status(run.where.scheduler))["stages"]}
    assert rows["left"] == {
        "stage": "left",
        "after": [],
        "workers": 2,
        "waiting": 1,
        "taken": 1,
        "calls": 0,
        "calls_under_way": 0,
        "limit": "",
        "failing": [],
    }
    assert rows["mix"] == rows["left"] | {
        "stage": "mix",
        "after": ["left", "right", "reward"],
        "workers": 1,
        "waiting": 0,
        "taken": 0,
    }


class Ledger:
    """A scheduler that accepts every operation."""

    def __init__(self) -> None:
        self.ops: list[Op] = []

    async def ask(self, body: Operations, *_: object, **__: object) -> Results:
        self.ops += body.ops
        return Results(results=[Result()] * len(body.ops))


async def test_a_report_of_failing_workers_counts_the_groups_that_have_passed_their_stage() -> None:
    """One group has passed the stage left and waits for its reward, until it is given up."""
    stage = Stage(name="left", run="m:f", makes=["score"])
    registrar = Registrar(cast("Client", Ledger()))
    nodes = graph(Config(prompts=Prompts(), reward=Reward(run=""), stage=[stage]))
    store = TrajectoryStore(MemoryStore(TABLES), map_bytes=1 << 20)
    shard = Shard(store, registrar, shard=0, stages=nodes, keep=FILTERS["zero_spread"])
    working = asyncio.create_task(registrar.run())
    for number in range(1 + HOLD_AFTER):
        specs, frames = specs_and_frames(payload(0, seed=number).to_arrays())
        item = PushItem(group=GroupId(number), lease=LeaseId(1), worker=WorkerId("w"), truncated=False, frames=specs)
        shard.push(parse_push(item, frames, GROUP_SIZE), lambda _: None)
    shard.commit()
    await registrar.idle()
    past, *others = shard.queues["left"].take("w", 1 + HOLD_AFTER, now_s=0.0, seconds_each=1.0)
    shard.finish(Columns(past.key, "left", {"stage/left/score": LEFT}), past.number, "w", lambda _: None)
    shard.commit()
    for ticket in others:
        shard.fail(ticket.key, "left", ticket.number, "w", "judge: refused")
    assert {load.stage: (len(load.failing), load.passed) for load in loads_of(shard)} == {
        "reward": (0, 0),
        "left": (1, 1),
    }
    shard.give_up([past.key], "reward: no number")
    await registrar.idle()
    assert {load.stage: (len(load.failing), load.passed) for load in loads_of(shard)}["left"] == (1, 0)
    working.cancel()


async def test_results_of_two_stages_in_one_commit_of_which_one_ends_the_group_release_it_once() -> None:
    stage = Stage(name="left", run="m:f", makes=["score"])
    ledger, store = Ledger(), TrajectoryStore(MemoryStore(TABLES), map_bytes=1 << 20)
    registrar = Registrar(cast("Client", ledger))
    nodes = graph(Config(prompts=Prompts(), reward=Reward(run=""), stage=[stage]))
    shard = Shard(store, registrar, shard=0, stages=nodes, keep=FILTERS["zero_spread"])
    told: list[Result] = []
    working = asyncio.create_task(registrar.run())
    specs, frames = specs_and_frames(payload(0).to_arrays())
    item = PushItem(group=GroupId(7), lease=LeaseId(1), worker=WorkerId("w"), truncated=False, frames=specs)
    shard.push(parse_push(item, frames, GROUP_SIZE), told.append)
    shard.commit()
    await registrar.idle()
    for name, column in (("reward", "stage/reward/reward"), ("left", "stage/left/score")):
        (ticket,) = shard.queues[name].take("w", 1, now_s=0.0, seconds_each=1.0)
        equal = {column: np.asarray([0.5, 0.5], np.float32)}
        shard.finish(Columns(ticket.key, name, equal), ticket.number, "w", told.append)
    shard.commit()
    await registrar.idle()
    working.cancel()
    assert told == [Result()] * 3
    assert [type(op) for op in ledger.ops] == [RegisterPush, RegisterRelease]
