"""A message that the scheduler refuses as a whole decides nothing about the operations in it."""

import asyncio
from collections.abc import Callable
from typing import cast

import numpy as np
import pytest

from staleflow.configs.schema import Config, Prompts, Reward
from staleflow.configs.stages import graph
from staleflow.net.client import Client
from staleflow.net.errors import Refused
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.consistency.ids import GroupId, LeaseId, WorkerId
from staleflow.protocols.wire.codec import ProtocolError
from staleflow.protocols.wire.messages import Op, Operations, PushItem, RegisterOccupy, RegisterPush, Result, Results
from staleflow.protocols.wire.stages import REWARD, REWARD_COLUMN
from staleflow.protocols.wire.tensors import specs_and_frames
from staleflow.servers.trajectories import records
from staleflow.servers.trajectories import registrar as registrars
from staleflow.servers.trajectories import shard as shards
from staleflow.servers.trajectories.filters import FILTERS
from staleflow.servers.trajectories.registrar import Registrar
from staleflow.servers.trajectories.shard import Shard
from staleflow.servers.trajectories.store import TABLES, Columns, TrajectoryStore
from staleflow.store.memory import MemoryStore
from tests.servers.running import payload
from tests.servers.trajectories.test_many_recovered import MAP_BYTES, pushed

LARGE = 13
"""The lease whose operation makes its message too large."""


class Scheduler:
    """Accept every operation; refuse messages according to ``no``."""

    def __init__(self) -> None:
        self.heard: list[Op] = []
        self.no: Callable[[list[Op]], Code | None] = lambda ops: None

    async def ask(self, body: Operations, *_: object, **__: object) -> Results:
        await asyncio.sleep(0)
        if (code := self.no(body.ops)) is not None:
            raise Refused(code, "no")
        self.heard += body.ops
        return Results(results=[Result()] * len(body.ops))


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registrars, "BUSY_RETRY_INTERVAL_S", 0.01)
    monkeypatch.setattr(shards, "RETRY_INTERVAL_S", 0.01)


def opened(scheduler: Scheduler, rows: MemoryStore) -> tuple[Shard, "asyncio.Task[None]"]:
    registrar = Registrar(cast("Client", scheduler))
    nodes = graph(Config(prompts=Prompts(), reward=Reward(run="")))
    store = TrajectoryStore(rows, map_bytes=MAP_BYTES)
    shard = Shard(store, registrar, shard=0, stages=nodes, keep=FILTERS["none"])
    return shard, asyncio.create_task(registrar.run())


async def until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def test_what_is_stored_stays_when_a_scheduler_wants_to_hear_nothing_and_is_told_when_it_does() -> None:
    scheduler, rows, told = Scheduler(), MemoryStore(TABLES), list[Result]()
    scheduler.no = lambda ops: Code.DENIED
    shard, running = opened(scheduler, rows)
    shard.push(pushed(1), told.append)
    shard.commit()
    await until(lambda: told)
    assert [result.code for result in told] == [Code.DENIED]
    running.cancel()
    shard, running = opened(scheduler, rows)  # the shard starts again, and the run is still over
    await shard.recover()
    await asyncio.sleep(0.05)
    shard.commit()
    assert [held.key for held in shard.holdings] == [pushed(1).key]
    scheduler.no = lambda ops: None
    await until(lambda: scheduler.heard)
    assert [op.lease for op in scheduler.heard if isinstance(op, RegisterPush)] == [1]
    running.cancel()


async def test_a_group_is_occupied_although_the_message_that_said_so_was_refused() -> None:
    scheduler, told = Scheduler(), list[Result]()
    shard, running = opened(scheduler, MemoryStore(TABLES))
    shard.push(pushed(1), told.append)
    shard.commit()
    await until(lambda: told)
    scheduler.no = lambda ops: Code.DENIED
    (ticket,) = shard.queues[REWARD].take("reward-0.1", 1, now_s=0.0, seconds_each=1.0)
    reward = {REWARD_COLUMN: np.array([1.0], np.float32)}
    shard.finish(Columns(ticket.key, REWARD, reward), ticket.number, "reward-0.1", told.append)
    shard.commit()
    await asyncio.sleep(0.05)
    scheduler.no = lambda ops: None
    await until(lambda: any(isinstance(op, RegisterOccupy) for op in scheduler.heard))
    running.cancel()


async def test_one_operation_that_makes_its_message_too_large_decides_nothing_of_the_others() -> None:
    scheduler, told = Scheduler(), dict[int, Code | None]()
    scheduler.no = lambda ops: Code.OVERSIZE if any(getattr(op, "lease", 0) == LARGE for op in ops) else None
    shard, running = opened(scheduler, MemoryStore(TABLES))

    def push(lease: int) -> None:
        shard.push(pushed(lease), lambda result: told.update({lease: result.code}))

    for lease in range(1, 20):
        push(lease)
    shard.commit()
    await until(lambda: len(told) == 19)
    assert [lease for lease, code in told.items() if code is not None] == [LARGE]
    assert LARGE not in [held.key.lease for held in shard.holdings]
    assert len([*shard.holdings]) == 18
    running.cancel()


def test_no_more_versions_can_have_written_a_group_than_any_bound_allows() -> None:
    group = payload(0, tokens=records.MAX_VERSIONS + 1, samples=1)
    rows = [[0, 0, version, 1] for version in range(records.MAX_VERSIONS + 1)]
    specs, frames = specs_and_frames(group.to_arrays() | {"segments": np.array(rows, np.int64)})
    worker = WorkerId("rollout-0.1")
    item = PushItem(group=GroupId(1), lease=LeaseId(1), worker=worker, truncated=False, frames=specs)
    with pytest.raises(
        ProtocolError,
        match=f"{records.MAX_VERSIONS + 1} segments by version; at most {records.MAX_VERSIONS} are allowed",
    ):
        records.parse_push(item, frames, samples=1)
