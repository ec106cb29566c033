"""Deletes take room too: in a map that is full they go through a few at a time, or wait."""

from collections.abc import Iterator, Sequence
from typing import cast

from staleflow.configs.schema import Config, Prompts, Reward
from staleflow.configs.stages import graph
from staleflow.protocols.consistency.ids import GroupId, LeaseId, WorkerId
from staleflow.runtime.client import Client
from staleflow.runtime.store import StoreFull
from staleflow.servers.trajectories.filters import FILTERS
from staleflow.servers.trajectories.holdings import Held
from staleflow.servers.trajectories.records import Key, Record
from staleflow.servers.trajectories.registrar import Registrar
from staleflow.servers.trajectories.shard import Shard
from staleflow.servers.trajectories.store import Loaded, TrajectoryStore

RECORD = Record(worker=WorkerId("w"), sha="", nbytes=1, truncated=False, segments=[], samples=[1], tokens=1)


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
        shard.holdings.add(Held(key, RECORD))
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
