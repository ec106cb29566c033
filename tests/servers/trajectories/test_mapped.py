"""Payload that the worker writes into a slab and the trainer maps keeps every guarantee of payload in frames."""

import asyncio
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from staleflow.clients.rollout.pushes import Pusher
from staleflow.clients.rollout.slab_writer import SlabWriter
from staleflow.clients.slab_reader import MappedSlabs
from staleflow.clients.stage import worker as stage_worker
from staleflow.clients.stage.worker import StageGroup, StageOutcome
from staleflow.clients.stage.worker import StageWorker as ShippedStageWorker
from staleflow.clients.trainer.data.batch import FetchedGroup
from staleflow.clients.trainer.data.fetch import Fetcher
from staleflow.net.client import worker_id
from staleflow.net.errors import Refused
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.wire.messages import (
    Assign,
    GetGroups,
    Groups,
    MemberRef,
    Place,
    PushGroups,
    PushItem,
    Result,
)
from staleflow.protocols.wire.tensors import Array, unpack
from tests.servers.running import GIVE_UP_S, WEIGHTS, Rollout, Run, StageWorker, Trainer, eventually, payload


class Slabbed:
    """Push as a rollout worker through the shipped classes."""

    def __init__(self, run: Run, rollout: Rollout) -> None:
        self._rollout = rollout
        shard = run.shard(rollout.worker)
        self.writer = SlabWriter(shard, rollout.worker)
        self.results: dict[int, Result] = {}
        self._pusher = Pusher(shard, rollout.worker, self._settled, self.writer)
        self._running = asyncio.create_task(self._pusher.run())

    def _settled(self, assign: Assign, result: Result) -> None:
        self.results[assign.group] = result
        self._rollout.held.pop(assign.lease, None)

    async def push(self, *assigns: Assign) -> None:
        for assign in assigns:
            self._pusher.put(assign, payload(assign.version, seed=assign.group))
        async with asyncio.timeout(GIVE_UP_S):
            await self._pusher.idle.wait()
        assert [self.results[assign.group].code for assign in assigns] == [None] * len(assigns)

    def close(self) -> None:
        self._running.cancel()


def slabs_of(run: Run) -> list[Path]:
    folder = run.run_dir / "trajectories-0" / "slabs"
    return sorted(folder.iterdir()) if folder.is_dir() else []


async def begun(run: Run, count: int) -> tuple[Trainer, Rollout, Slabbed, list[Assign]]:
    trainer = await run.trainer()
    await trainer.publish(0, WEIGHTS)
    rollout = await run.rollout()
    return trainer, rollout, Slabbed(run, rollout), await rollout.leases(count)


async def judged(run: Run, count: int) -> None:
    stage, done = StageWorker(run), 0
    while done < count:
        items, _ = await stage.take()
        await stage.finish(items)
        done += len(items)


def fetcher(run: Run, trainer: Trainer, *, mapped: bool = True) -> Fetcher:
    return Fetcher([run.shard(trainer.worker)], mapped=mapped)


def same(fetched: Sequence[FetchedGroup], members: Sequence[MemberRef]) -> bool:
    """Check that these groups are the members, as they were written."""
    return [item.group for item in fetched] == [member.group for member in members] and all(
        np.array_equal(getattr(item.payload, name), column)
        for item, member in zip(fetched, members, strict=True)
        for name, column in payload(member.version, seed=member.group).to_arrays().items()
    )


async def test_a_batch_comes_out_of_slabs_as_it_was_written(run: Run) -> None:
    trainer, _, slabbed, assigns = await begun(run, 2)
    await slabbed.push(*assigns)
    assert len(slabs_of(run)) == 1
    await judged(run, 2)
    batch = await trainer.next_batch(0)
    in_maps = await fetcher(run, trainer).members(batch.members)
    in_frames = await fetcher(run, trainer, mapped=False).members(batch.members)
    assert same(in_maps, batch.members)
    assert same(in_frames, batch.members)
    assert in_maps[0].payload.stages.keys() == {"stage/reward/reward"} == in_frames[0].payload.stages.keys()
    ask = GetGroups(groups=[m.group for m in batch.members], shas=[m.sha for m in batch.members], host="another")
    reply, frames = await run.shard(trainer.worker).call(ask)
    assert isinstance(reply, Groups)
    assert ([item.place for item in reply.groups], len(frames)) == ([None, None], 16)
    slabbed.close()


async def test_a_byte_that_changed_in_a_slab_is_never_served(run: Run) -> None:
    trainer, _, slabbed, assigns = await begun(run, 3)
    await slabbed.push(*assigns)
    await judged(run, 3)
    batch = await trainer.next_batch(0)
    bad, (slab,) = batch.members[0], slabs_of(run)
    data = slab.read_bytes()
    place = data.index(payload(bad.version, seed=bad.group).token_ids.tobytes())
    with slab.open("r+b") as file:
        file.seek(place)
        file.write(bytes([data[place] ^ 1]))
    with pytest.raises(Refused, match=f"the payload of group {bad.group}, .* it is quarantined") as no:
        await fetcher(run, trainer).members(batch.members)
    assert no.value.code is Code.STALE
    again = await trainer.next_batch(0)
    assert bad.group not in [member.group for member in again.members]
    assert same(await fetcher(run, trainer).members(again.members), again.members)
    slabbed.close()


async def test_a_worker_that_writes_between_the_look_and_the_sha256_harms_only_its_own_group(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sha256 is right, but its bytes are not a group."""
    trainer, _, slabbed, assigns = await begun(run, 3)
    torn: list[bool] = []

    def looked(data: memoryview) -> dict[str, Array]:
        found = unpack(bytes(data))
        if not torn:
            torn.append(True)
            (slab,) = slabs_of(run)
            with slab.open("r+b") as file:
                file.write(bytes(4))
        return found

    monkeypatch.setattr("staleflow.servers.trajectories.records.unpack", looked)
    await slabbed.push(*assigns)
    await judged(run, 2)
    batch = await trainer.next_batch(0)
    assert assigns[0].group not in [member.group for member in batch.members]
    assert same(await fetcher(run, trainer).members(batch.members), batch.members)
    slabbed.close()


async def test_a_killed_shard_has_what_it_acknowledged_and_takes_frames_for_slabs_it_no_longer_has(
    make_run: Callable[..., Run],
) -> None:
    run = make_run()
    run.scheduler()
    run.parameters()
    run.process("trajectories", 0)
    trainer, rollout, slabbed, assigns = await begun(run, 2)
    await slabbed.push(assigns[0])
    assert run.kill("trajectories-0") == -9
    run.process("trajectories", 0)
    await slabbed.push(assigns[1])  # names the old slab, which may be another file now: sent in frames
    await judged(run, 2)
    batch = await trainer.next_batch(0)
    assert same(await fetcher(run, trainer).members(batch.members), batch.members)
    rest = await rollout.leases(1)
    assert run.kill("trajectories-0") == -9
    lost = slabs_of(run)
    for slab in lost:
        slab.unlink()
    run.process("trajectories", 0)
    # names a slab that does not exist: sent in frames, which go into one of the shard's own
    await slabbed.push(rest[0])
    assert len(slabs_of(run)) == 1
    assert not {*slabs_of(run)} & {*lost}
    slabbed.close()


async def test_a_shard_that_gives_no_slabs_gets_frames(make_run: Callable[..., Run]) -> None:
    run = make_run(trajectories={"mapped": False, "map_mb": 16})
    run.scheduler()
    run.trajectories()
    run.parameters()
    trainer, _, slabbed, assigns = await begun(run, 2)
    await slabbed.push(*assigns)
    await judged(run, 2)
    batch = await trainer.next_batch(0)
    assert same(await fetcher(run, trainer).members(batch.members), batch.members)
    assert not (run.run_dir / "trajectories-0" / "slabs").exists()
    slabbed.close()


async def test_a_worker_of_another_host_takes_no_slab_of_the_shard(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("staleflow.clients.rollout.slab_writer.boot_id", lambda: "another")
    trainer, _, slabbed, assigns = await begun(run, 2)
    await slabbed.push(*assigns)
    await judged(run, 2)
    batch = await trainer.next_batch(0)
    assert same(await fetcher(run, trainer).members(batch.members), batch.members)
    assert await slabbed.writer.write([b"payload"]) is None
    assert len(slabs_of(run)) == 1  # the shard's own slab, for payload that arrived in frames
    slabbed.close()


async def test_a_slab_is_written_again_only_when_its_batch_is_consumed_and_kept_by_no_checkpoint(run: Run) -> None:
    trainer, rollout, slabbed, assigns = await begun(run, 2)
    await slabbed.push(*assigns)
    await judged(run, 2)
    batch = await trainer.next_batch(0)
    (slab,) = slabs_of(run)
    before = slab.read_bytes()
    await trainer.publish(1, WEIGHTS, batch.batch)
    # the next push requests a slab; it must not get this one, whose batch a rollback may bring back
    slabbed.writer.abandon()
    await slabbed.push(*(await rollout.leases(2)))
    assert len(slabs_of(run)) == 2
    assert slab.read_bytes() == before
    assert same(await fetcher(run, trainer).members(batch.members), batch.members)
    slabbed.close()


async def test_a_slab_of_a_worker_that_has_gone_is_deleted_when_nothing_needs_it(run: Run) -> None:
    _, rollout, slabbed, assigns = await begun(run, 2)
    item = PushItem(
        group=assigns[0].group,
        lease=assigns[0].lease,
        worker=rollout.worker,
        truncated=False,
        frames=[],
        place=Place(slab="no-such", offset=0, nbytes=10),
    )
    with pytest.raises(Refused, match="slab 'no-such' is gone"):
        await rollout.shards[0].call(PushGroups(items=[item]))
    await slabbed.writer.write([b"never pushed"])
    assert len(slabs_of(run)) == 1
    slabbed.close()
    for client in run.clients:
        client.close()

    async def deleted() -> bool:
        return not slabs_of(run)

    await eventually(deleted)


async def test_with_power_durability_a_slab_is_on_the_disk_before_its_push_is_answered(
    make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(trajectories={"durability": "power", "map_mb": 16})
    run.scheduler()
    run.trajectories()
    run.parameters()
    synced: list[str] = []
    sync = os.fdatasync

    def noted(descriptor: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        sync(descriptor)

    monkeypatch.setattr(os, "fdatasync", noted)
    _, _, slabbed, assigns = await begun(run, 1)
    await slabbed.push(assigns[0])
    assert synced == [slabs_of(run)[0].name, "slabs"]
    slabbed.close()


async def test_a_batch_is_whole_as_soon_as_a_shard_is_back_though_it_has_not_found_its_scheduler(run: Run) -> None:
    trainer, _, slabbed, assigns = await begun(run, 2)
    await slabbed.push(*assigns)
    await judged(run, 2)
    batch = await trainer.next_batch(0)
    await run.stop("scheduler")
    await run.stop("trajectories-0")
    run.trajectories()
    for mapped in (True, False):
        fetched = await fetcher(run, trainer, mapped=mapped).members(batch.members)
        assert same(fetched, batch.members)
        assert [item.payload.stages["stage/reward/reward"].tolist() for item in fetched] == [[0.0, 1.0]] * 2
    slabbed.close()


class Judge:
    """A stage that checks each payload against the written one and scores half of the samples as right."""

    together: ClassVar[bool] = False

    def __init__(self) -> None:
        self.seen: list[int] = []

    async def make(self, groups: Sequence[StageGroup]) -> Sequence[StageOutcome]:
        for group in groups:
            written = payload(int(group.payload.segments[0, 2]), seed=group.group).to_arrays()
            assert all(np.array_equal(getattr(group.payload, name), column) for name, column in written.items())
            self.seen.append(group.group)
        return [{"reward": np.asarray([0.0, 1.0], np.float32)}] * len(groups)

    async def accepted(self, groups: Sequence[StageGroup]) -> None:
        pass


@pytest.mark.parametrize("readable", [True, False])
async def test_a_stage_worker_maps_what_it_judges_or_asks_again_for_frames(
    run: Run, monkeypatch: pytest.MonkeyPatch, readable: bool
) -> None:
    opened: list[str] = []
    mapped = MappedSlabs.open

    def spied(self: MappedSlabs, folder: str, place: Place) -> memoryview:
        opened.append(folder)
        return mapped(self, folder if readable else f"{folder}/elsewhere", place)

    monkeypatch.setattr(MappedSlabs, "open", spied)
    trainer, _, slabbed, assigns = await begun(run, 2)
    await slabbed.push(*assigns)
    me, judge = worker_id("reward-0"), Judge()
    stage = ShippedStageWorker(worker=me, name="reward", stage=judge, max_groups=2)
    working = asyncio.create_task(stage.serve([run.shard(me)]))
    batch = await trainer.next_batch(0)
    working.cancel()
    assert sorted(judge.seen) == sorted(member.group for member in batch.members)
    assert len(opened) == (2 if readable else 1)
    slabbed.close()


@pytest.mark.parametrize("host", ["", "another"], ids=["mapped", "in frames"])
async def test_a_stage_never_judges_a_byte_that_changed_in_a_slab(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, host: str
) -> None:
    if host:
        monkeypatch.setattr(stage_worker, "boot_id", lambda: host)
    trainer, _, slabbed, assigns = await begun(run, 3)
    await slabbed.push(*assigns)
    (slab,) = slabs_of(run)
    tokens = payload(assigns[0].version, seed=assigns[0].group).token_ids.tobytes()
    place = slab.read_bytes().index(tokens)
    with slab.open("r+b") as file:
        file.seek(place)
        file.write(bytes([tokens[0] ^ 1]))
    me, judge = worker_id("reward-0"), Judge()
    stage = ShippedStageWorker(worker=me, name="reward", stage=judge, max_groups=3)
    working = asyncio.create_task(stage.serve([run.shard(me)]))
    batch = await trainer.next_batch(0)
    working.cancel()
    assert assigns[0].group not in judge.seen
    assert {member.group for member in batch.members} <= {*judge.seen} & {assign.group for assign in assigns[1:]}

    async def quarantined() -> bool:
        return bool((await run.status(run.where.scheduler))["totals"]["releases"].get("aborted") == 1)

    assert await eventually(quarantined)
    assert f"quarantined: the payload of group {assigns[0].group}" in caplog.text  # the shard has checked the bytes
    slabbed.close()
