"""The scheduler decides the holder of a lease that two workers push under; the holder gets no conflict."""

from pathlib import Path
from typing import Any

from staleflow.configs.schema import Config, Prompts, Reward
from staleflow.configs.stages import graph
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.consistency.ids import GroupId, LeaseId, WorkerId
from staleflow.protocols.wire.messages import Op, PushItem, Result
from staleflow.protocols.wire.tensors import specs_and_frames
from staleflow.servers.trajectories.filters import none
from staleflow.servers.trajectories.records import Pushed, parse_push
from staleflow.servers.trajectories.registrar import Then
from staleflow.servers.trajectories.shard import Shard
from staleflow.servers.trajectories.store import TABLES, TrajectoryStore
from staleflow.store import lmdb as lmdb_store
from tests.servers.running import payload


class Scheduler:
    """A scheduler that sends no reply until ``answer``."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Op, Then]] = []

    def add(self, op: Op, then: Then) -> None:
        self.waiting.append((op, then))

    def answer(self, result: Result) -> None:
        for _, then in self.waiting:
            then(result)
        self.waiting.clear()


def push_of(worker: str, seed: int) -> Pushed:
    specs, frames = specs_and_frames(payload(0, seed=seed).to_arrays())
    item = PushItem(group=GroupId(5), lease=LeaseId(7), worker=WorkerId(worker), truncated=False, frames=specs)
    return parse_push(item, frames, payload(0).num_samples)


def test_the_holder_of_a_lease_waits_for_the_scheduler_and_then_pushes(tmp_path: Path) -> None:
    map_bytes = 8 << 20
    store = lmdb_store.Store(tmp_path, tables=TABLES, map_bytes=map_bytes, durability="process")
    scheduler: Any = Scheduler()
    stages = graph(Config(prompts=Prompts(), reward=Reward(run="")))
    shard = Shard(TrajectoryStore(store, map_bytes=map_bytes), scheduler, shard=0, stages=stages, keep=none)
    told: dict[str, list[Code | None]] = {"evil": [], "holder": []}

    def push(worker: str, seed: int) -> None:
        shard.push(push_of(worker, seed), lambda result: told[worker].append(result.code))

    push("evil", 1)
    push("holder", 2)  # in the same drain
    shard.commit()
    push("holder", 2)  # and in a later one
    assert told == {"evil": [], "holder": [Code.BUSY, Code.BUSY]}
    scheduler.answer(Result(code=Code.STALE_LEASE))
    push("holder", 2)
    shard.commit()
    scheduler.answer(Result())
    assert told == {"evil": [Code.STALE_LEASE], "holder": [Code.BUSY, Code.BUSY, None]}
    push("evil", 1)
    assert told["evil"][1:] == [Code.CONFLICT]
    store.close()
