"""Deletes need room too: in a full map the shard deletes a few records at a time, or waits."""

from collections.abc import Iterator, Sequence
from typing import cast

import numpy as np

from staleflow.configs.schema import Config, Prompts, Reward
from staleflow.configs.stages import graph
from staleflow.net.client import Client
from staleflow.protocols.consistency.ids import GroupId, LeaseId, WorkerId
from staleflow.protocols.wire.stages import REWARD, REWARD_COLUMN
from staleflow.servers.trajectories.filters import FILTERS
from staleflow.servers.trajectories.holdings import StoredGroup
from staleflow.servers.trajectories.records import Key, Record
from staleflow.servers.trajectories.registrar import Registrar
from staleflow.servers.trajectories.shard import Shard
from staleflow.servers.trajectories.store import TABLES, Columns, Loaded, TrajectoryStore
from staleflow.store.base import StoreFull, key_number
from staleflow.store.memory import MemoryStore

RECORD = Record(
    worker=WorkerId("w"), sha="", nbytes=1, truncated=False, segments=[], samples=[1], tokens=1, prompt_tokens=1
)


class Narrow:
    """A store with room to delete ``most`` payloads in one transaction."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.gone: list[Key] = []

    def load(self) -> Iterator[Loaded]:
        return iter(())

    def delete(self, keys: Sequence[Key]) -> None:
        if len(keys) > self.most:
            raise StoreFull("used up")
        self.gone += keys

    def turn_over(self) -> None:
        pass


def forgetting(store: Narrow, keys: Sequence[Key]) -> Shard:
    registrar = Registrar(cast(Client, None))
    shard = Shard(
        cast(TrajectoryStore, store),
        registrar,
        shard=0,
        stages=graph(Config(prompts=Prompts(), reward=Reward(run=""))),
        keep=FILTERS["none"],
    )
    for key in keys:
        shard.holdings.add(StoredGroup(key, RECORD))
        shard.forget(key)
    return shard


KEYS = [Key(GroupId(number), LeaseId(number + 1)) for number in range(11)]


async def test_a_map_that_has_little_room_is_emptied_a_few_at_a_time() -> None:
    store = Narrow(most=2)
    forgetting(store, KEYS).commit()
    assert store.gone == KEYS


async def test_a_map_without_any_room_keeps_the_deletes_for_later() -> None:
    store = Narrow(most=0)
    shard = forgetting(store, KEYS)
    shard.commit()
    assert store.gone == []
    store.most = 99
    shard.commit()
    assert store.gone == KEYS


def test_with_a_payload_goes_what_stages_made_of_it_and_nothing_else() -> None:
    memory = MemoryStore(TABLES)
    store = TrajectoryStore(memory, map_bytes=1 << 20)
    made = {REWARD_COLUMN: np.zeros(1, np.float32)}
    store.write_columns([Columns(key, stage, made) for key in KEYS[:3] for stage in (REWARD, "judge")])
    store.delete([KEYS[1], KEYS[5]])
    with memory.read() as txn:
        left = [(key_number(raw[:8]), raw[16:].decode()) for raw in txn.keys("columns")]
    assert left == [(group, stage) for group in (0, 2) for stage in ("judge", REWARD)]
