"""A shard that starts with very many groups: what comes in meanwhile does not wait behind all of them."""

import asyncio
import hashlib
from typing import cast

import msgspec
import numpy as np

from staleflow.configs.schema import Config, Prompts, Reward
from staleflow.configs.stages import graph
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.consistency.events import Segment
from staleflow.protocols.consistency.ids import GroupId, LeaseId, Lineage, Version, WorkerId
from staleflow.protocols.wire.messages import Operations, RegisterPush, Result, Results
from staleflow.runtime.client import Client
from staleflow.runtime.memory_store import MemoryStore
from staleflow.servers.trajectories.filters import FILTERS
from staleflow.servers.trajectories.records import Key, Pushed, Record
from staleflow.servers.trajectories.registrar import BATCH, Registrar
from staleflow.servers.trajectories.shard import RECOVER_AT_ONCE, Shard
from staleflow.servers.trajectories.store import TABLES, Columns, TrajectoryStore

STORED = 20 * RECOVER_AT_ONCE
MAP_BYTES = 64 << 20


class Ledger:
    """Stands for a scheduler; notes in which order it hears of leases, and is too full for some of them."""

    def __init__(self, busy: range = range(0)) -> None:
        self.heard: list[int] = []
        self._busy = busy

    async def ask(self, body: Operations, *_: object, **__: object) -> Results:
        await asyncio.sleep(0.002)  # longer than a turn of the loop
        leases = [op.lease for op in body.ops if isinstance(op, RegisterPush)]
        self.heard += leases
        return Results(results=[Result(code=Code.BUSY) if lease in self._busy else Result() for lease in leases])


def pushed(lease: int) -> Pushed:
    blob = b"%d" % lease
    record = Record(
        worker=WorkerId("rollout-0"),
        sha=hashlib.sha256(blob).hexdigest(),
        nbytes=len(blob),
        truncated=False,
        segments=[Segment(Lineage(0), Version(0), 1)],
        samples=[1],
        tokens=1,
        prompt_tokens=1,
    )
    return Pushed(Key(GroupId(lease), LeaseId(lease)), record, [blob])


def shard(ledger: Ledger) -> tuple[Shard, Registrar]:
    """With everything stored that an earlier process had."""
    store = TrajectoryStore(MemoryStore(TABLES), map_bytes=MAP_BYTES)
    store.write_pushes([pushed(lease) for lease in range(1, STORED + 1)])
    registrar = Registrar(cast("Client", ledger))
    return Shard(
        store, registrar, shard=0, stages=graph(Config(prompts=Prompts(), reward=Reward(run=""))), keep=FILTERS["none"]
    ), registrar


async def test_a_new_push_is_told_between_the_old_ones() -> None:
    ledger = Ledger()
    one, registrar = shard(ledger)
    working = [asyncio.create_task(registrar.run()), asyncio.create_task(one.recover())]
    while not ledger.heard:  # noqa: ASYNC110
        await asyncio.sleep(0)
    told: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
    one.push(pushed(STORED + 1), told.set_result)
    one.commit()
    assert await told == Result()
    assert ledger.heard.index(STORED + 1) <= RECOVER_AT_ONCE + 2 * BATCH
    await working[1]
    await registrar.idle()
    assert sorted(ledger.heard) == list(range(1, STORED + 2))
    working[0].cancel()


async def test_old_ones_that_a_full_scheduler_puts_off_do_not_keep_the_others() -> None:
    ledger = Ledger(busy=range(1, RECOVER_AT_ONCE + 1))
    one, registrar = shard(ledger)
    working = [asyncio.create_task(registrar.run()), asyncio.create_task(one.recover())]
    async with asyncio.timeout(10):
        while max(ledger.heard, default=0) < 2 * RECOVER_AT_ONCE:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    for task in working:
        task.cancel()


def test_a_trainer_gets_the_columns_of_a_group_that_is_not_taken_up_yet() -> None:
    store = TrajectoryStore(MemoryStore(TABLES), map_bytes=MAP_BYTES)
    store.write_pushes([pushed(1)])
    rewards = np.asarray([1.0], np.float32)
    store.write_columns([Columns(pushed(1).key, "reward", {"stage/reward/reward": rewards})])
    registrar = Registrar(cast("Client", Ledger()))
    nodes = graph(Config(prompts=Prompts(), reward=Reward(run="")))
    one = Shard(store, registrar, shard=0, stages=nodes, keep=FILTERS["none"])
    held = one.holdings.find(pushed(1).key)
    assert held is not None
    assert one.read_columns([held])[0]["stage/reward/reward"].tolist() == [1.0]


def test_rewards_that_came_with_a_group_are_there_after_a_restart_with_what_the_filter_made_of_them() -> None:
    store = TrajectoryStore(MemoryStore(TABLES), map_bytes=MAP_BYTES)
    plain = pushed(1)
    rewards = np.asarray([0.25, 1.0], np.float32)
    store.write_pushes([plain._replace(record=msgspec.structs.replace(plain.record, rewards=rewards.tobytes()))])
    nodes = graph(Config(prompts=Prompts(), reward=Reward(run="")))
    one = Shard(store, Registrar(cast("Client", Ledger())), shard=0, stages=nodes, keep=FILTERS["zero_spread"])
    held = one.holdings.find(plain.key)
    assert held is not None
    assert held.done == {"reward": -1}
    assert one.read_columns([held])[0]["stage/reward/reward"].tolist() == [0.25, 1.0]
    asyncio.run(one.recover())
    assert held.keep
