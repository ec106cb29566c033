"""A run resumes from the state that a power failure leaves: the writes and folder entries that were synced before.

``Disk`` records what ``fsync`` and ``fdatasync`` bring to the disk, by inode: the bytes of a file, the names in a
folder. It rebuilds the run directory from these records alone.
"""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from staleflow.clients.trainer.checkpoint import Checkpoints, TrainerState
from staleflow.clients.weights import Puller
from staleflow.configs.loading.load import read_run, write_resolved
from staleflow.configs.schema import Config, Model, Prompts, Reward
from staleflow.launch.keys import ensure_folder
from staleflow.net.allow_list import read_allowed
from staleflow.net.keys import ALLOWED, read_key
from staleflow.protocols.consistency.ids import Lineage, Version, WorkerId
from staleflow.store.lmdb import FILE
from staleflow.supervisor import model, rundir
from staleflow.trace.audit.report import audit
from tests.servers.running import WEIGHTS, Run, StageWorker, eventually
from tests.servers.scheduler.world import config


class Disk:
    """The state of a folder that would survive a power failure."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir()
        self._files: dict[int, bytes] = {}
        self._folders: dict[int, dict[str, os.stat_result]] = {root.stat().st_ino: {}}

    def synced(self, descriptor: int) -> None:
        path, found = Path(f"/proc/self/fd/{descriptor}"), os.fstat(descriptor)
        if path.is_dir():
            names = os.listdir(descriptor)
            self._folders[found.st_ino] = {
                name: os.stat(name, dir_fd=descriptor, follow_symlinks=False) for name in names
            }
        else:
            self._files[found.st_ino] = path.read_bytes()

    def fail(self) -> None:
        """Replace the folder by the synced state."""
        before = self.root.rename(self.root.with_name("before"))
        self._restore(before, self.root)

    def _restore(self, before: Path, after: Path) -> None:
        after.mkdir(mode=before.stat().st_mode)
        for name, found in self._folders.get(before.stat().st_ino, {}).items():
            source, target = before / name, after / name
            if source.is_dir():
                self._restore(source, target)
                continue
            if source.name == FILE:  # LMDB syncs this file without Python
                target.write_bytes(source.read_bytes())
            elif not source.is_socket():
                target.write_bytes(self._files.get(found.st_ino, b""))
            if target.exists():
                target.chmod(found.st_mode)


BUILD = f"{__name__}:build"


@pytest.fixture
def disk(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Disk:
    disk = Disk(short_dir / "disk")

    def noted(real: Callable[[int], None]) -> Callable[[int], None]:
        def sync(descriptor: int) -> None:
            real(descriptor)
            disk.synced(descriptor)

        return sync

    monkeypatch.setattr(os, "fsync", noted(os.fsync))
    monkeypatch.setattr(os, "fdatasync", noted(os.fdatasync))
    return disk


POWER = {server: {"durability": "power"} for server in ("scheduler", "trajectories", "parameters")}


async def test_a_run_resumes_from_what_a_power_failure_leaves(disk: Disk) -> None:
    run_dir = disk.root / "mine"
    run = Run(run_dir, **POWER)
    try:
        for start in (run.scheduler, run.trajectories, run.parameters):
            start()
        trainer = await run.trainer()
        await trainer.publish(0, WEIGHTS)
        rollout, stage = await run.rollout(), StageWorker(run)
        first, second, third = (await rollout.leases(3))[:3]
        await rollout.push(first, second)
        done = 0
        while done < 2:
            items, _ = await stage.take(most=2 - done)
            await stage.finish(items)
            done += len(items)
        batch = await trainer.next_batch(0)
        await trainer.publish(1, {"w": np.ones(3, np.float32)}, batch.batch)
        assert [result.code for result in await rollout.push(third)] == [None]
        identity = (await run.status(run.where.scheduler))["run"]
        checkpoints = Checkpoints(run_dir / "checkpoints", run=identity, keep=2)
        checkpoints.save(TrainerState(version=Version(1)), _weights)
        disk.fail()
        await run.close()
        assert read_run(run_dir) == run.config
        run = Run(run_dir, **POWER)
        for start in (run.scheduler, run.trajectories, run.parameters):
            start()
        assert (await run.status(run.where.scheduler))["version"] == 1
        versions = (await run.status(run.where.parameters))["versions"]
        assert versions[-1]["version"] == 1
        puller = Puller(run.where.parameters, worker=WorkerId("reader.1"))
        run.clients.append(puller)
        async with await puller.pull(Lineage(0), Version(1)) as version:
            np.testing.assert_array_equal(version.arrays()["w"], np.ones(3, np.float32))
        await eventually(lambda: _holds(run, third.group))
        assert [state.version for _, state in checkpoints.newest()] == [1]
        assert audit(run_dir / "trace.jsonl").violations == []
    finally:
        await run.close()


def _weights(path: Path) -> None:
    (path / "sub").mkdir()
    (path / "sub" / "weights").write_bytes(b"w" * 1000)


async def _holds(run: Run, group: int) -> bool:
    items, _ = await StageWorker(run, name="reward-1").take(most=1, wait_ms=200)
    return [item.group for item in items] == [group]


def test_the_configuration_is_on_the_disk_when_it_is_written(disk: Disk) -> None:
    run_dir = disk.root / "runs" / "mine"
    with rundir.claim(config(), run_dir, resume=False):
        disk.fail()
        assert read_run(run_dir) == config()


def test_keys_are_on_the_disk_when_they_are_made(disk: Disk) -> None:
    folder = disk.root / "keys"
    ensure_folder(folder)
    disk.fail()
    server = read_key(folder / "server.key")
    assert server.public in read_allowed(folder / ALLOWED)


def build(folder: Path, *, seed: int) -> None:
    """Write a model directory that passes the directory check."""
    folder.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (folder / name).write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")


def test_a_model_is_on_the_disk_when_it_is_built(disk: Disk) -> None:
    made = Config(prompts=Prompts(source="nobody:opens"), reward=Reward(run="nobody:calls"), model=Model(build=BUILD))
    run_dir = disk.root / "mine"
    write_resolved(made, run_dir)
    model.ensure(made, run_dir)
    disk.fail()
    assert (run_dir / "model" / "model.safetensors").read_bytes() == b"weights"
