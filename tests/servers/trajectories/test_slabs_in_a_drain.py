"""A slab that a push names stays unchanged from the arrival of the push until its commit, whatever comes between."""

import asyncio
from collections.abc import Sequence
from mmap import mmap
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from staleflow.configs.loading.prompt_rows import PromptRows
from staleflow.configs.schema import Config, Prompts, Reward
from staleflow.configs.stages import graph
from staleflow.net.errors import Refused
from staleflow.net.memory_transport import MemoryEndpoint
from staleflow.process.host import boot_id
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.consistency.ids import GroupId, LeaseId, WorkerId
from staleflow.protocols.wire.messages import GetSlab, Op, Place, Refusal, Reply, Result, Slab
from staleflow.protocols.wire.payload_digest import payload_digest
from staleflow.protocols.wire.stages import REWARD, REWARD_COLUMN
from staleflow.servers.runner import Tasks
from staleflow.servers.trajectories.filters import none
from staleflow.servers.trajectories.main import make_service
from staleflow.servers.trajectories.prompts import LoadedPrompts
from staleflow.servers.trajectories.records import Key, Pushed, Record
from staleflow.servers.trajectories.registrar import Then
from staleflow.servers.trajectories.shard import Shard
from staleflow.servers.trajectories.slabs import Slabs
from staleflow.servers.trajectories.store import TABLES, Columns, TrajectoryStore
from staleflow.store.base import StoreFull, number_key
from staleflow.store.memory import MemoryStore
from tests.servers.trajectories.scarce import no_descriptor

Step = tuple[str, WorkerId, int, int]
MB = 1 << 20
NBYTES = 64
ALL = 10**9
"""Number of writes that a full store refuses."""
WORKERS = [WorkerId("rollout-0.1"), WorkerId("rollout-1.1")]


class Scheduler:
    """Accept every push at once."""

    def add(self, op: Op, then: Then) -> None:
        then(Result())


class Store(MemoryStore):
    """A store that is full for the next ``refuses`` writes."""

    refuses = 0

    def write(self) -> Any:
        if self.refuses:
            self.refuses -= 1
            raise StoreFull("used up")
        return super().write()


class World:
    """A shard with room for few slabs, and workers that overwrite every byte of each slab they get."""

    def __init__(
        self,
        folder: Path,
        *,
        map_bytes: int = 5 * MB,
        store: Store | None = None,
        scheduler: Any = None,
        sync: bool = False,
    ) -> None:
        self.folder = folder / "slabs"
        self.slabs = Slabs(self.folder, map_bytes=map_bytes)
        self.store = store or Store(TABLES)
        registrar: Any = scheduler or Scheduler()
        kept: Any = self.store
        self.shard = Shard(
            TrajectoryStore(kept, map_bytes=map_bytes, slabs=self.slabs, sync=sync),
            registrar,
            shard=0,
            stages=graph(Config(prompts=Prompts(), reward=Reward(run=""))),
            keep=none,
        )
        self.given: dict[WorkerId, list[str]] = {worker: [] for worker in WORKERS}
        self.taken = 0
        """Pushes that the shard accepted."""
        self.told: list[Code | None] = []
        """Replies to these pushes."""
        self._asked = self._places = 0

    def get(self, worker: WorkerId, held: Sequence[str] = ()) -> str:
        self._asked += 1
        asked = GetSlab(worker=worker, host=boot_id(), number=self._asked, held=list(held))
        name = self.slabs.give(asked, self.shard.slab_room()).name
        if name:
            self.given[worker].append(name)
            self._write(name, 0, bytes(MB))
        return name

    def push(self, worker: WorkerId, number: int, name: str = "") -> None:
        """Push a group in the slab ``name``, or in frames without one; skip the push if the slab is gone."""
        data, offset = data_of(number), 0
        if name:
            self._places += 1
            offset = self._places * NBYTES
            try:
                self.slabs.written_bytes(worker, Place(slab=name, offset=offset, nbytes=NBYTES))
            except Refused:
                return
            self._write(name, offset, data)
        self.taken += 1
        self.shard.push(pushed(number, name, offset), lambda result: self.told.append(result.code))

    def forget(self, number: int) -> None:
        if (held := self.shard.holdings.find(key_of(number))) is not None:
            self.shard.forget(held.key)

    def check(self) -> None:
        """Check that every stored group has the bytes that were pushed."""
        for held in self.shard.holdings:
            assert bytes(self.shard.view_payload(held)) == data_of(held.key.group)

    def end(self) -> None:
        """Check that every push has its reply, and that no slab is in use once all groups are forgotten."""
        self.store.refuses = 0
        self.shard.commit()
        self.check()
        assert len(self.told) == self.taken
        for held in list(self.shard.holdings):
            self.shard.forget(held.key)
        self.shard.commit()
        for worker in WORKERS:
            self.slabs.lose(worker)
        counts = self.slabs.counts()
        # the shard's own slab remains, ready to be written
        assert (counts["holding"], counts["files"]) in ((0, 0), (0, 1))

    def _write(self, name: str, offset: int, data: bytes) -> None:
        with (self.folder / name).open("r+b") as file, mmap(file.fileno(), 0) as mapped:
            mapped[offset : offset + len(data)] = data


def key_of(number: int) -> Key:
    return Key(GroupId(number), LeaseId(number))


def data_of(number: int) -> bytes:
    return bytes([1 + number]) * NBYTES


def pushed(number: int, slab: str = "", offset: int = 0) -> Pushed:
    """A push in a slab, or in frames."""
    data = data_of(number)
    record = Record(
        worker=WORKERS[0],  # for the shard, equal keys come from the same worker
        sha=payload_digest((data,)),
        nbytes=NBYTES,
        truncated=False,
        segments=[],
        samples=[1],
        tokens=1,
        prompt_tokens=1,
        slab=slab,
        offset=offset,
    )
    return Pushed(key_of(number), record, b"" if slab else data)


def test_a_slab_with_a_push_that_waits_for_its_commit_makes_no_room_for_another(tmp_path: Path) -> None:
    world, (me, other) = World(tmp_path), WORKERS
    first = world.get(me)
    named = world.get(me, [first])
    world.push(me, 1, named)
    assert world.get(me) == first  # ``first`` is empty; the worker reports that it no longer writes to the other slab
    while world.get(other, world.given[other]):
        pass
    world.shard.commit()
    assert world.told == [None]
    world.check()
    world.end()


def test_a_slab_with_a_push_that_waits_for_its_commit_is_not_given_anew(tmp_path: Path) -> None:
    world, (me, _) = World(tmp_path), WORKERS
    named = world.get(me)
    world.push(me, 1, named)
    assert world.get(me) not in ("", named)
    world.shard.commit()
    world.check()
    world.end()


def test_a_worker_that_is_lost_before_its_push_is_stored_loses_nothing_that_it_pushed(tmp_path: Path) -> None:
    world, (me, _) = World(tmp_path), WORKERS
    world.push(me, 1, world.get(me))
    world.slabs.lose(me)
    world.shard.commit()
    assert world.told == [None]
    world.check()
    world.end()


def test_a_push_that_finds_no_room_keeps_no_slab(tmp_path: Path) -> None:
    world, (me, _) = World(tmp_path), WORKERS
    named = world.get(me)
    world.push(me, 1, named)
    world.store.refuses = ALL
    world.shard.commit()
    assert world.told == [Code.BUSY]
    assert world.get(me) == named
    world.end()


def test_a_push_again_of_what_is_still_to_be_deleted_waits_until_that_is_gone(tmp_path: Path) -> None:
    world, (me, _) = World(tmp_path), WORKERS
    first = world.get(me)
    world.push(me, 1, first)
    world.shard.commit()
    world.forget(1)
    world.push(me, 1, world.get(me, [first]))
    world.store.refuses = 1  # the delete fails; the push that follows finds room
    world.shard.commit()
    assert world.told == [None, Code.BUSY]
    world.push(me, 1, world.given[me][-1])
    world.shard.commit()
    assert world.told == [None, Code.BUSY, None]
    world.end()


async def test_a_push_again_of_a_damaged_record_leaves_nothing_of_what_was_there(tmp_path: Path) -> None:
    store, key, (me, _) = Store(TABLES), key_of(1), WORKERS
    before = TrajectoryStore(store, map_bytes=MB)  # had no room for a slab
    before.write_pushes([pushed(1)])
    before.write_columns([Columns(key, REWARD, {REWARD_COLUMN: np.ones(1, np.float32)})])
    with store.write() as txn:
        txn.put("records", number_key(key.group) + number_key(key.lease), b"damaged")
    world = World(tmp_path, store=store)
    world.push(me, 1, world.get(me))
    world.shard.commit()
    again = World(tmp_path, store=store)
    again.check()
    assert [(held.key, held.done) for held in again.shard.holdings] == [(key, {})]
    assert again.shard.retainable() == []  # the group awaits its registration, and no damaged record is left
    await again.shard.recover()


def test_a_push_that_cannot_be_synced_for_want_of_a_descriptor_is_busy_and_is_taken_later(tmp_path: Path) -> None:
    world, me = World(tmp_path, sync=True), WORKERS[0]
    name = world.get(me)
    world.push(me, 1, name)
    with no_descriptor():
        world.shard.commit()
    assert (world.told, world.shard.full()) == ([Code.BUSY], "disk")
    world.push(me, 1, name)
    world.shard.commit()
    assert (world.told, world.shard.full()) == ([Code.BUSY, None], "")
    world.end()


async def test_a_shard_that_drains_is_busy_and_says_nothing_of_slabs(tmp_path: Path) -> None:
    store: Any = Store(TABLES)
    nobody: Any = None
    config = Config(prompts=Prompts(), reward=Reward(run=""))
    said: list[Reply] = []
    async with asyncio.TaskGroup() as group:
        kept = TrajectoryStore(store, map_bytes=5 * MB, slabs=Slabs(tmp_path / "slabs", map_bytes=5 * MB))
        service = make_service(config, 0, kept, LoadedPrompts(PromptRows([b"{}"])), nobody, Tasks(group))
        endpoint = MemoryEndpoint(service.on_call, lambda deliver: deliver())
        for number in (1, 2):
            asked = GetSlab(worker=WORKERS[0], host=boot_id(), number=number, held=[])
            endpoint.call(WORKERS[0], asked, said.append)
            service.drain()
    given_before, drained = said
    assert isinstance(given_before, Slab)
    assert given_before.name
    assert isinstance(drained, Refusal)
    assert (drained.code, drained.retry_after_ms > 0) == (Code.BUSY, True)


NUMBERS = st.integers(0, 5)
WHICH = st.integers(0, 3)
STEPS = st.one_of(
    st.tuples(st.just("push"), st.sampled_from(WORKERS), NUMBERS, WHICH),
    st.tuples(st.just("frames"), st.sampled_from(WORKERS), NUMBERS, st.just(0)),
    st.tuples(st.just("get"), st.sampled_from(WORKERS), st.just(0), WHICH),
    st.tuples(st.just("lose"), st.sampled_from(WORKERS), st.just(0), st.just(0)),
    st.tuples(st.just("forget"), st.sampled_from(WORKERS), NUMBERS, st.just(0)),
    st.tuples(st.just("full"), st.sampled_from(WORKERS), st.just(0), WHICH),
    st.tuples(st.just("commit"), st.sampled_from(WORKERS), st.just(0), st.just(0)),
)


@settings(max_examples=150)
@given(steps=st.lists(STEPS, max_size=30))
def test_whatever_comes_in_one_drain_no_byte_of_a_group_is_written_again(steps: list[Step]) -> None:
    with TemporaryDirectory() as folder:
        world = World(Path(folder))
        for what, worker, number, which in steps:
            given_to = world.given[worker]
            match what:
                case "push" if given_to:
                    world.push(worker, number, given_to[-1 - which % len(given_to)])
                case "frames":
                    world.push(worker, number)
                case "get":
                    world.get(worker, given_to[len(given_to) - which :])
                case "lose":
                    world.slabs.lose(worker)
                case "forget":
                    world.forget(number)
                case "full":
                    world.store.refuses = (ALL, 0, 1, 2)[which]
                case "commit":
                    world.shard.commit()
                case _:
                    pass
            world.check()
        world.end()
