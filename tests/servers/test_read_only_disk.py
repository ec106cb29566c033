"""While a file system is read-only under live servers, writes are refused ``busy``, until an operator remounts it.

The tests use an ext4 file system in a file and abort its journal: the kernel then makes it read-only under open files,
as after an error of a real disk. They require the right to mount.
"""

import asyncio
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from staleflow.configs.durable_files import sync_path
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.wire.messages import Assign, GetRows, Rows
from staleflow.servers.parameters.service import COLLECT_INTERVAL_S
from staleflow.servers.trajectories.service import RETAIN_INTERVAL_S
from staleflow.trace.audit.report import audit
from tests.servers.running import WEIGHTS, Rollout, Run, StageWorker, eventually

DISK_BYTES = 128 << 20
SERVERS = ("scheduler", "trajectories-0", "parameters")


class Disk:
    """A separate file system."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "d"
        self._image = folder / "image"

    def make(self) -> bool:
        self.path.mkdir()
        with self._image.open("wb") as file:
            file.truncate(DISK_BYTES)
        return not _done("mkfs.ext4", "-q", str(self._image)) and self.mount()

    def mount(self) -> bool:
        return not _done("mount", "-o", "loop,errors=remount-ro", str(self._image), str(self.path))

    def turn_read_only(self) -> None:
        assert _done("mount", "-o", "remount,abort", str(self.path)) == 0

    def repair(self) -> None:
        """Remount the file system, as an operator would."""
        assert _done("umount", str(self.path)) == 0
        assert _done("fsck.ext4", "-fy", str(self._image)) in (0, 1)
        assert self.mount()


def _done(*command: str) -> int:
    return subprocess.run(command, capture_output=True, check=False).returncode


@pytest.fixture
def disk(short_dir: Path) -> Iterator[Disk]:
    disk = Disk(short_dir)
    if shutil.which("mkfs.ext4") is None or not disk.make():
        pytest.skip("an ext4 file system cannot be mounted here")
    try:
        yield disk
    finally:
        _done("umount", "-l", str(disk.path))


async def test_servers_on_a_disk_that_turns_read_only_refuse_writes_serve_reads_and_do_not_end(disk: Disk) -> None:
    power = {"durability": "power", "map_mb": 16}
    run = Run(disk.path / "run", scheduler=power, trajectories=power, parameters={"durability": "power"})
    sync_path(run.run_dir / "prompts.jsonl")
    try:
        _start(run)
        trainer = await run.trainer()
        await trainer.publish(0, WEIGHTS)
        rollout, stage = await run.rollout(), StageWorker(run)
        first, second, third = (await rollout.leases(3))[:3]
        await rollout.until_room()
        assert [result.code for result in await rollout.push(first)] == [None]
        items, _ = await stage.take(most=1)
        disk.turn_read_only()
        (refused,) = await rollout.push(second)
        assert refused.code is Code.BUSY
        large = {"w": np.ones(1 << 16, np.float32)}
        finishing = asyncio.create_task(stage.finish(items))
        waiting = [asyncio.create_task(asking) for asking in (trainer.publish(1, large), run.trainer("other"))]
        assert "the scheduler's file system is read-only" in (await _until(run, "full", "read-only"))["why"]
        rows = await rollout.shards[0].ask(GetRows(groups=[third.group]), Rows)
        assert len(rows.rows) == 1
        await _serves_for(run, max(RETAIN_INTERVAL_S, COLLECT_INTERVAL_S) + 2)
        assert [one.result() for one in waiting if one.done()] == []
        assert [result.code for result in await finishing] == [Code.STALE_LEASE], "its stage is done once more"
        for one in waiting:
            one.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for name in SERVERS:
            assert run.kill(name, signal.SIGTERM) == 0
        while run.clients:
            run.clients.pop().close()  # some clients have files of the parameter server open
        disk.repair()
        _start(run)
        await eventually(lambda: _holds(run, 1))
        rollout = await run.rollout()
        (lease,) = (await rollout.leases(1))[:1]
        await eventually(lambda: _takes(rollout, lease))
        for name in SERVERS:
            assert run.kill(name, signal.SIGTERM) == 0
        report = audit(run.run_dir / "trace.jsonl")
        assert report.violations == []
        assert report.events["push"] == 2
    finally:
        await run.close()


def _start(run: Run) -> None:
    run.process("scheduler")
    run.process("trajectories", 0)
    run.process("parameters")


async def _until(run: Run, key: str, wanted: str) -> dict[str, str]:
    async def found() -> dict[str, str] | None:
        status = await run.status(run.where.scheduler)
        return status if status[key] == wanted else None

    status: dict[str, str] = await eventually(found)
    return status


async def _serves_for(run: Run, seconds: float) -> None:
    """Check that every server replies for ``seconds``, in which its periodic work has used the disk as well."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for address in run.where.all:
            await asyncio.wait_for(run.status(address), 10)
        await asyncio.sleep(0.2)


async def _takes(rollout: Rollout, lease: Assign) -> bool:
    """Retry a push: a shard is busy until the scheduler has sent the limits of the model."""
    (result,) = await rollout.push(lease)
    assert result.code in (None, Code.BUSY)
    return result.code is None


async def _holds(run: Run, groups: int) -> bool:
    held = (await run.status(run.where.trajectories[0]))["groups"]
    return bool(sum(held.values()) == groups)
