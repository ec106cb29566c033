"""A worker resends payload to a full shard once the shard has reported free room, and not before."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from staleflow.net.client import Client
from staleflow.net.endpoint import Call
from staleflow.net.errors import Unavailable
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.consistency.ids import WorkerId
from staleflow.protocols.wire.messages import Assign, PushGroups, PushItem, Results
from staleflow.protocols.wire.tensors import specs_and_frames
from staleflow.servers.trajectories import service
from staleflow.servers.trajectories.service import TrajectoryService
from staleflow.servers.trajectories.store import TrajectoryStore
from staleflow.store.base import FULL_SHARE, DiskFull
from tests.clients.rollout.peers import ONCE
from tests.servers.running import WEIGHTS, Run, eventually, payload
from tests.servers.trajectories.remote_engine import Engine

QUESTIONS = 20
"""Number of requests from the workers of a full shard during which nothing else should arrive."""


class Incoming:
    """Record the pushes that reach the shard, and simulate a full map or disk."""

    def __init__(self) -> None:
        self.pushes: list[tuple[str, list[int]]] = []
        """(worker, groups) of each push, in order."""
        self.nbytes = 0
        """Payload bytes received."""
        self.questions = 0
        """Number of pushes without a group."""
        self.map_full = False
        self.disk_full = False

    def hear(self, call: Call) -> None:
        if isinstance(call.body, PushGroups) and call.body.items:
            self.pushes.append((call.peer, [item.group for item in call.body.items]))
            self.nbytes += sum(frame.nbytes for frame in call.frames)
        elif isinstance(call.body, PushGroups):
            self.questions += 1

    async def pushed(self, count: int) -> None:
        """Wait until ``count`` pushes have arrived."""

        async def enough() -> bool:
            return len(self.pushes) >= count

        await eventually(enough)

    async def asked(self, more: int = QUESTIONS) -> None:
        """Wait for ``more`` further requests."""
        until = self.questions + more

        async def enough() -> bool:
            return self.questions >= until

        await eventually(enough)


@pytest.fixture
def incoming(monkeypatch: pytest.MonkeyPatch) -> Incoming:
    seen = Incoming()
    on_call, used, write = TrajectoryService.on_call, TrajectoryStore.used_share, TrajectoryStore.write_pushes

    def hear(self: TrajectoryService, call: Call) -> None:
        seen.hear(call)
        on_call(self, call)

    def used_share(self: TrajectoryStore) -> float:
        return FULL_SHARE if seen.map_full else used(self)

    def write_pushes(self: TrajectoryStore, *args: Any, **named: Any) -> Any:
        if seen.disk_full:
            raise DiskFull("there is no room")
        return write(self, *args, **named)

    monkeypatch.setattr(service, "BUSY_MS", 50)
    monkeypatch.setattr(TrajectoryService, "on_call", hear)
    monkeypatch.setattr(TrajectoryStore, "used_share", used_share)
    monkeypatch.setattr(TrajectoryStore, "write_pushes", write_pushes)
    return seen


async def engines(run: Run, groups: int, count: int = 2) -> list[tuple[Engine, list[Assign]]]:
    """Return ``count`` engines of one worker, each with its own connection and ``groups`` leases."""
    trainer = await run.trainer()
    await trainer.publish(0, WEIGHTS)
    rollout = await run.rollout(capacity=count * groups)
    leased = await rollout.leases(count * groups)
    shards = [run.shard(rollout.worker, limits=ONCE) for _ in range(count)]
    return [(Engine(rollout, shard), leased[n * groups : (n + 1) * groups]) for n, shard in enumerate(shards)]


@pytest.fixture
def wide(make_run: Callable[..., Run]) -> Run:
    run = make_run(rollout={"group_size": 2, "max_inflight": 64}, trainer={"batch_size": 16})
    run.scheduler()
    run.trajectories()
    run.parameters()
    return run


async def test_a_full_shard_is_sent_each_payload_once_and_then_asked_for_room(wide: Run, incoming: Incoming) -> None:
    working = await engines(wide, 4)
    incoming.map_full = True
    for engine, leased in working:
        engine.put(*leased)
    await incoming.asked()
    assert len(incoming.pushes) == len(working)
    groups = [group for _, pushed in incoming.pushes for group in pushed]
    assert len(set(groups)) == len(groups)
    sent = incoming.nbytes
    assert sent > 0
    late = working[0][1].pop()  # reaches a shard that is known to be full
    assert working[0][0].pusher.drop(late)
    working[0][0].put(late)
    working[0][1].append(late)
    await incoming.asked()
    assert incoming.nbytes == sent
    assert all(engine.codes == {} for engine, _ in working)
    incoming.map_full = False
    for engine, leased in working:
        await engine.idle()
        assert engine.codes == {assign.group: [None] for assign in leased}
        engine.close()
    after = [pushed for _, pushed in incoming.pushes[len(working) :]]
    assert sorted(group for pushed in after for group in pushed) == sorted(a.group for _, ls in working for a in ls)


async def test_after_a_no_one_group_is_offered_first_and_then_the_others_in_their_order(
    wide: Run, incoming: Incoming
) -> None:
    ((engine, leased),) = await engines(wide, 5, count=1)
    incoming.map_full = True
    engine.put(*leased, tokens=100)
    await incoming.asked(2)
    incoming.map_full = False
    await engine.idle()
    engine.close()
    groups = [assign.group for assign in leased]
    assert [pushed for _, pushed in incoming.pushes] == [groups, groups[:1], groups[1:]]


async def test_a_group_that_waits_for_room_can_be_dropped(wide: Run, incoming: Incoming) -> None:
    ((engine, leased),) = await engines(wide, 3, count=1)
    incoming.map_full = True
    engine.put(*leased)
    await incoming.asked(2)
    assert engine.pusher.drop(leased[1])
    assert not engine.pusher.drop(leased[1])
    incoming.map_full = False
    await engine.idle()
    engine.close()
    assert engine.codes == {leased[0].group: [None], leased[2].group: [None]}
    status = await wide.status(wide.where.trajectories[0])
    assert sum(status["groups"].values()) == 2


async def test_a_full_disk_is_tried_by_one_worker_at_a_time_with_one_group(
    wide: Run, incoming: Incoming, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "RETRY_INTERVAL_S", 1e6)
    working = await engines(wide, 3)
    incoming.disk_full = True
    for engine, leased in working:
        engine.put(*leased)
    await incoming.asked()
    first = len(working)
    assert len(incoming.pushes) == first
    status = await wide.status(wide.where.trajectories[0])
    assert status["full"] == "disk"

    async def why() -> bool:
        said: str = (await wide.status(wide.where.scheduler))["why"]
        return said.startswith("trajectory server 0: its disk is full; pushes wait")

    await eventually(why)
    monkeypatch.setattr(service, "RETRY_INTERVAL_S", 0.0)
    await incoming.pushed(first + 3)
    assert {len(pushed) for _, pushed in incoming.pushes[first:]} == {1}
    incoming.disk_full = False
    for engine, leased in working:
        await engine.idle()
        assert engine.codes == {assign.group: [None] for assign in leased}
        engine.close()
    assert (await wide.status(wide.where.trajectories[0]))["full"] == ""


async def test_a_group_too_large_for_what_room_there_is_does_not_keep_smaller_ones_out(
    wide: Run, incoming: Incoming, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "RETRY_INTERVAL_S", 0.0)
    monkeypatch.setattr("staleflow.clients.rollout.pushes.BUSY_RETRY_INTERVAL_S", 0.0)
    large: list[int] = []
    write = TrajectoryStore.write_pushes

    def write_pushes(self: TrajectoryStore, pushes: Sequence[Any], *args: Any, **named: Any) -> Any:
        if any(one.key.group in large for one in pushes):
            raise DiskFull("there is no room for it")
        return write(self, pushes, *args, **named)

    monkeypatch.setattr(TrajectoryStore, "write_pushes", write_pushes)
    ((engine, leased),) = await engines(wide, 4, count=1)
    large.append(leased[0].group)
    incoming.disk_full = True
    engine.put(*leased)
    await incoming.asked(2)
    incoming.disk_full = False

    async def others() -> bool:
        return set(engine.codes) == {assign.group for assign in leased[1:]}

    await eventually(others)
    large.clear()
    await engine.idle()
    engine.close()
    assert engine.codes == {assign.group: [None] for assign in leased}


async def test_groups_of_one_message_are_judged_each_by_itself(wide: Run, incoming: Incoming) -> None:
    trainer = await wide.trainer()
    await trainer.publish(0, WEIGHTS)
    holder = await wide.rollout()
    leased = (await holder.leases(2))[:2]
    await wide.stop("scheduler")  # no scheduler can resolve the holder of the lease
    evil = WorkerId("evil.1")
    squatter, owner = (wide.shard(worker, limits=ONCE) for worker in (evil, holder.worker))
    squatting = asyncio.create_task(push(squatter, evil, leased[:1]))
    await incoming.pushed(1)
    pushing = asyncio.create_task(push(owner, holder.worker, leased))
    await incoming.pushed(2)
    wide.scheduler()
    assert await pushing == [Code.BUSY, None]
    assert len(incoming.pushes) == 2
    assert await squatting == [Code.STALE_LEASE]
    assert await push(owner, holder.worker, leased) == [None, None]


async def push(shard: Client, worker: WorkerId, assigns: Sequence[Assign]) -> list[Code | None]:
    items: list[PushItem] = []
    frames: list[memoryview] = []
    for assign in assigns:
        specs, more = specs_and_frames(payload(assign.version, seed=assign.group).to_arrays())
        frames += more
        items.append(PushItem(group=assign.group, lease=assign.lease, worker=worker, truncated=False, frames=specs))
    answer = await shard.ask(PushGroups(items=items), Results, frames, timeout_s=20)
    return [result.code for result in answer.results]


async def test_a_push_that_found_no_room_has_one_answer_afterwards(wide: Run, incoming: Incoming) -> None:
    trainer = await wide.trainer()
    await trainer.publish(0, WEIGHTS)
    rollout = await wide.rollout()
    leased, shard = (await rollout.leases(1))[:1], rollout.shards[0]
    incoming.map_full = True
    assert await push(shard, rollout.worker, leased) == [Code.BUSY]
    with pytest.raises(Unavailable, match="the trajectory server's map is nearly full"):
        await shard.ask(PushGroups(items=[]), Results, timeout_s=3)
    incoming.map_full = False
    assert (await shard.ask(PushGroups(items=[]), Results)).results == []
    assert [await push(shard, rollout.worker, leased) for _ in range(2)] == [[None], [None]]
    assert (await wide.status(wide.where.scheduler))["totals"]["pushes"] == 1
