"""A shard that starts with very many groups serves new requests without waiting for all of them to recover."""

import asyncio
import tracemalloc
from pathlib import Path
from typing import cast

import msgspec
import numpy as np
import pytest

from staleflow.configs.schema import Config, Prompts, Reward, Stage
from staleflow.configs.stages import graph
from staleflow.net.client import Client
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.consistency.ids import GroupId, LeaseId, Lineage, Segment, Version, WorkerId
from staleflow.protocols.wire.messages import Operations, RegisterPush, Result, Results
from staleflow.protocols.wire.payload_digest import payload_digest
from staleflow.servers.trajectories.filters import FILTERS
from staleflow.servers.trajectories.records import Key, Pushed, Record
from staleflow.servers.trajectories.registrar import BATCH, Registrar
from staleflow.servers.trajectories.shard import RECOVER_AT_ONCE, Shard
from staleflow.servers.trajectories.store import TABLES, Columns, CorruptRecord, TrajectoryStore
from staleflow.store.lmdb import Store
from staleflow.store.memory import MemoryStore

STORED = 20 * RECOVER_AT_ONCE
MAP_BYTES = 64 << 20


class Ledger:
    """A scheduler that records the order of the reported leases and is too full for some of them."""

    def __init__(self, busy: range = range(0)) -> None:
        self.heard: list[int] = []
        self._busy = busy

    async def ask(self, body: Operations, *_: object, **__: object) -> Results:
        await asyncio.sleep(0.002)  # longer than a turn of the event loop
        leases = [op.lease for op in body.ops if isinstance(op, RegisterPush)]
        self.heard += leases
        return Results(results=[Result(code=Code.BUSY) if lease in self._busy else Result() for lease in leases])


def pushed(lease: int) -> Pushed:
    blob = b"%d" % lease
    record = Record(
        worker=WorkerId("rollout-0"),
        sha=payload_digest((blob,)),
        nbytes=len(blob),
        truncated=False,
        segments=[Segment(Lineage(0), Version(0), 1)],
        samples=[1],
        tokens=1,
        prompt_tokens=1,
    )
    return Pushed(Key(GroupId(lease), LeaseId(lease)), record, blob)


def shard(ledger: Ledger) -> tuple[Shard, Registrar]:
    """Return a shard with everything that an earlier process stored."""
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
    async with asyncio.timeout(60):
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


LEASES = range(1, 41)
COLUMN = (1).to_bytes(8, "big") * 2 + b"judge"
"""Key of the column that stage ``judge`` made for the first group."""
VALUES = np.linspace(0, 1, 1 << 16, dtype=np.float32)
JUDGED = graph(
    Config(prompts=Prompts(), reward=Reward(run=""), stage=[Stage(name="judge", run="m:f", makes=["values:token"])])
)


def judged(path: Path) -> Store:
    """The store of an earlier process: groups with a reward each and a large column of another stage."""
    store = Store(path, tables=TABLES, map_bytes=MAP_BYTES, durability="process")
    trajectories = TrajectoryStore(store, map_bytes=MAP_BYTES)
    for one in map(pushed, LEASES):
        trajectories.write_pushes([one])
        reward = Columns(one.key, "reward", {"stage/reward/reward": np.asarray([0.5], np.float32)})
        trajectories.write_columns([reward, Columns(one.key, "judge", {"stage/judge/values:token": VALUES})])
    return store


def started(store: Store) -> Shard:
    registrar = Registrar(cast("Client", Ledger()))
    return Shard(TrajectoryStore(store, map_bytes=MAP_BYTES), registrar, shard=0, stages=JUDGED, keep=FILTERS["none"])


def test_a_start_reads_of_what_stages_made_the_rewards_and_nothing_else(tmp_path: Path) -> None:
    store = judged(tmp_path)
    tracemalloc.start()
    try:
        one = started(store)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < VALUES.nbytes
    assert [held.done for held in one.holdings] == [{"reward": -1, "judge": -1}] * len(LEASES)
    found = one.read_columns([*one.holdings])
    assert all(np.array_equal(columns["stage/judge/values:token"], VALUES) for columns in found)
    store.close()


def test_a_column_that_has_changed_is_found_when_it_is_read(tmp_path: Path) -> None:
    store = judged(tmp_path)
    with store.write() as txn:
        value = bytearray(txn.get("columns", COLUMN) or b"")
        value[-1] ^= 1
        txn.put("columns", COLUMN, value)
    one = started(store)
    held = one.holdings.find(pushed(1).key)
    assert held is not None
    with pytest.raises(CorruptRecord) as found:
        one.read_columns([held])
    assert found.value.key == held.key
    store.close()


def test_a_record_with_a_column_of_no_stage_is_damaged(tmp_path: Path) -> None:
    store = judged(tmp_path)
    with store.write() as txn:
        value = txn.get("columns", COLUMN) or b""
        txn.delete("columns", COLUMN)
        txn.put("columns", COLUMN.replace(b"judge", b"jufge"), value)
    one = started(store)
    assert one.holdings.find(pushed(1).key) is None
    assert pushed(1).key in one.retainable()
    store.close()
