"""On a full disk, writes are refused ``busy`` and reads continue; everything continues once the disk has room again.

The tests mount a 24 MiB file system in memory, which requires the right to mount. The maps are larger than the file
system, so the disk fills before they do; full maps have their own tests next to each server.
"""

import asyncio
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import pytest

from staleflow.clients.weights import Puller
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.consistency.ids import Lineage, Version, WorkerId
from staleflow.protocols.wire.messages import (
    Assign,
    GetGroups,
    GetRows,
    Groups,
    PushGroups,
    PushItem,
    Result,
    Results,
    Rows,
)
from staleflow.protocols.wire.tensors import specs_and_frames
from staleflow.trace.audit.report import audit
from tests.servers.running import WEIGHTS, Rollout, Run, StageWorker, eventually, payload
from tests.servers.scheduler.world import Cast, World, config

DISK_BYTES = 24 << 20
LEFT_BYTES = 1 << 20
MAX_STARTS = 20
"""One of this many starts on a full disk must run out of room."""


class Disk:
    """A small file system."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._filler = path / "filler"

    def fill(self, left: int = LEFT_BYTES) -> None:
        """Fill the disk until at most ``left`` bytes are free."""
        with self._filler.open("ab", buffering=0) as file:
            while (free := self.free()) > left:
                file.write(bytes(min(free - left, 1 << 20)))

    def empty(self) -> None:
        """Remove the file that ``fill`` wrote."""
        self._filler.unlink()

    def free(self) -> int:
        found = subprocess.run(
            ["stat", "-f", "-c", "%a %S", str(self.path)], capture_output=True, text=True, check=True
        )
        blocks, size = map(int, found.stdout.split())
        return blocks * size


@pytest.fixture
def disk(short_dir: Path) -> Iterator[Disk]:
    path = short_dir / "d"
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(path)],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"a small file system cannot be mounted here: {mounted.stderr.strip()}")
    try:
        yield Disk(path)
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


@pytest.fixture
async def on_disk(disk: Disk) -> AsyncIterator[Run]:
    """All three servers, on the small disk."""
    run = Run(disk.path / "run", scheduler={"map_mb": 64}, trajectories={"map_mb": 64}, trainer={"batch_size": 12})
    for start in (run.scheduler, run.trajectories, run.parameters):
        start()
    yield run
    await run.close()


async def push(rollout: Rollout, assign: Assign, tokens: int) -> Result:
    """Push a large payload."""
    specs, frames = specs_and_frames(payload(assign.version, seed=assign.group, tokens=tokens).to_arrays())
    item = PushItem(group=assign.group, lease=assign.lease, worker=rollout.worker, truncated=False, frames=specs)
    answer = await rollout.shards[0].ask(PushGroups(items=[item]), Results, frames)
    return answer.results[0]


async def test_a_shard_on_a_full_disk_refuses_pushes_serves_reads_and_goes_on_by_itself(
    on_disk: Run, disk: Disk
) -> None:
    run, tokens = on_disk, 20_000  # 0.4 MB per group
    trainer = await run.trainer()
    await trainer.publish(0, WEIGHTS)
    rollout = await run.rollout(capacity=24)
    leased = await rollout.leases(12)
    taken: list[Assign] = []
    disk.fill()
    refused = ""
    for assign in leased:
        result = await push(rollout, assign, tokens)
        if result.code is Code.BUSY:
            refused = result.detail
            break
        assert result.code is None
        taken.append(assign)
    assert taken, "void: nothing was taken before the disk was full"
    assert "is full" in refused, "void: nothing was refused"
    rows = await rollout.shards[0].ask(GetRows(groups=[taken[0].group]), Rows)
    assert len(rows.rows) == 1
    held = (await run.status(run.where.trajectories[0]))["groups"]
    assert sum(held.values()) == len(taken)
    items, _ = await StageWorker(run).take(most=2)
    assert items, "no payload is served"
    assert {item.group for item in items} <= {assign.group for assign in taken}
    disk.empty()
    late = leased[len(taken)]
    room = await rollout.shards[0].ask(PushGroups(items=[]), Results, timeout_s=20)  # the same process
    assert room.results == []
    assert (await push(rollout, late, tokens)).code is None
    held = (await run.status(run.where.trajectories[0]))["groups"]
    assert sum(held.values()) == len(taken) + 1


async def test_the_parameter_server_on_a_full_disk_refuses_a_version_serves_the_others_and_goes_on(
    on_disk: Run, disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    run = on_disk
    trainer = await run.trainer()
    await trainer.publish(0, WEIGHTS)
    rollout, stage = await run.rollout(capacity=24), StageWorker(run)
    for assign in await rollout.leases(12):
        await rollout.push(assign)
    items, _ = await stage.take(most=12)
    while len(items) < 12:
        items += (await stage.take(most=12))[0]
    await stage.finish(items)
    batch = await trainer.next_batch(0)
    disk.fill()
    large = {"w": np.ones(2 << 20, np.float32)}
    publishing = asyncio.create_task(trainer.publish(1, large, batch.batch))
    await eventually(lambda: _said(caplog, "no room"))
    assert not publishing.done()
    assert [version["version"] for version in (await run.status(run.where.parameters))["versions"]] == [0]
    puller = Puller(run.where.parameters, worker=WorkerId("reader.1"))
    async with await puller.pull(Lineage(0), Version(0)) as version:
        np.testing.assert_array_equal(version.arrays()["embed"], WEIGHTS["embed"])
    fetch = GetGroups(groups=[m.group for m in batch.members], shas=[m.sha for m in batch.members])
    groups, _ = await run.shard(trainer.worker).call(fetch)
    assert isinstance(groups, Groups)
    disk.empty()
    async with asyncio.timeout(20):
        assert (await publishing).version == 1  # the same server process, after a retry by the client
    puller.close()


async def test_the_scheduler_on_a_full_disk_refuses_pushes_answers_looks_and_goes_on(disk: Disk) -> None:
    world = World(disk.path / "run", config(batch_size=24, map_mb=64))
    world.start()
    try:
        cast = await Cast(world, capacity=64).enter()
        held = await cast.instance.until_held(24)
        disk.fill(left=256 << 10)
        codes: list[Code | None] = []
        while None not in codes[-1:] or len(codes) < len(held):
            fat = cast.shard.fat_push(held[len(codes)], cast.instance.worker, 200_000)
            codes += [result.code for result in await cast.shard.operate(fat)]
            if codes[-1] is not None:
                break
        assert codes[-1] is Code.BUSY, "void: the disk was never full"
        full = await world.status()
        assert full["full"] == "disk"
        assert full["ledger"]["pushed"] == len(codes) - 1
        disk.empty()
        await world.until("full", "")
        (accepted,) = await cast.shard.operate(cast.shard.push(held[len(codes) - 1], cast.instance.worker))
        assert accepted.code is None
        assert (await world.status())["incarnation"] == 1  # the same process
        assert world.stop() == 0
        assert world.audit().events["push"] == len(codes)
    finally:
        world.close()


async def test_a_scheduler_that_starts_or_ends_on_a_full_disk_loses_nothing(disk: Disk) -> None:
    world = World(disk.path / "run", config(batch_size=4, map_mb=64))
    world.start()
    try:
        cast = await Cast(world).enter()
        await cast.instance.until_held(4)
        disk.fill(left=0)
        full = [""]
        while not full[-1]:  # each start needs a little room, and finds it in partly used pages
            assert len(full) < MAX_STARTS, "void: there was room at every start"
            assert world.stop() == 0
            world.start()
            status = await world.status()
            assert status["ledger"]["leased"] == 4
            full.append(status["full"])
        assert full[-1] == "disk"
        assert world.stop() == 0
        world.start()
        assert (await world.until("full", "disk"))["ledger"]["leased"] == 4
        disk.empty()
        await world.until("full", "")
        await eventually(lambda: _finished(cast))
        assert world.stop() == 0
        report = audit(world.run_dir / "trace.jsonl")
        assert report.violations == []
        assert report.events["open"] > 1
    finally:
        world.close()


async def test_a_shard_and_a_parameter_server_start_on_a_full_disk_with_what_they_had(disk: Disk) -> None:
    run = Run(disk.path / "run", scheduler={"map_mb": 64}, trajectories={"map_mb": 64}, trainer={"batch_size": 4})
    try:
        run.scheduler()
        run.process("trajectories", 0)
        run.process("parameters")
        trainer = await run.trainer()
        await trainer.publish(0, WEIGHTS)
        rollout = await run.rollout(capacity=8)
        leased = await rollout.leases(4)
        await rollout.until_room()
        assert {result.code for result in await rollout.push(*leased)} == {None}
        disk.fill(left=0)
        for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGTERM):
            codes = [run.kill(name, number) for name in ("trajectories-0", "parameters")]
            assert codes == ([0, 0] if number == signal.SIGTERM else [-number, -number])
            run.process("trajectories", 0)
            run.process("parameters")
            held = (await run.status(run.where.trajectories[0]))["groups"]
            assert sum(held.values()) == len(leased)
            await eventually(lambda: _serves_its_version(run))
        disk.empty()
        items, _ = await StageWorker(run).take(most=4)
        assert items
        assert {result.code for result in await rollout.push(*await rollout.leases(4))} == {None}
    finally:
        await run.close()


async def _said(caplog: pytest.LogCaptureFixture, what: str) -> bool:
    return what in caplog.text


async def _serves_its_version(run: Run) -> bool:
    """Return False until the restarted parameter server has attached."""
    (version,) = (await run.status(run.where.parameters))["versions"]
    assert version["corrupt"] == ""
    return bool(version["registered"])


async def _finished(cast: Cast) -> bool:
    held = await cast.instance.until_held(4)
    results = await cast.shard.operate(*(cast.shard.push(assign, cast.instance.worker) for assign in held))
    return {result.code for result in results} == {None}
