"""Versions in shared memory: they survive a kill of the server, give way to the disk, and are one run's."""

import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from staleflow.clients.weights import Puller
from staleflow.configs.errors import ConfigError
from staleflow.configs.schema import Parameters
from staleflow.process import memory_folder
from staleflow.protocols.consistency.ids import Lineage, TrainerTerm, Version, WorkerId
from staleflow.protocols.wire.manifest import digest, lay_out
from staleflow.servers.parameters.memory import Memory, open_memory
from staleflow.servers.parameters.versions import About, NoRoom, Stored, VersionKey, Versions
from staleflow.supervisor.leftovers import sweep
from tests.servers.parameters.test_service import files, versions
from tests.servers.running import WEIGHTS, Run
from tests.servers.test_after_the_end import closed

MIB = 1 << 20
MEMORY = Parameters(store="memory")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on disk, whose folder in memory is removed at the end."""
    folder = tmp_path / "run" / "parameters"
    folder.parent.mkdir()
    yield folder
    if folder in OPEN:
        OPEN.pop(folder).close()
    path = memory_folder.path_of(folder)
    if path.is_symlink():
        path.unlink()
    shutil.rmtree(path, ignore_errors=True)


OPEN: dict[Path, Memory] = {}
"""Memory of the last server of each folder on disk."""


def opened(disk: Path, parameters: Parameters = MEMORY, run: str = "a") -> Versions:
    """The folders of a parameter server that has attached to this run. The one before it has ended."""
    disk.mkdir(exist_ok=True)  # a run of another test would sweep the memory of a folder that is gone
    if disk in OPEN:
        OPEN.pop(disk).close()
    if (memory := open_memory(disk, parameters)) is not None:
        OPEN[disk] = memory
    stored = Versions(disk, durability=parameters.durability, memory=memory)
    stored.reach(run)
    return stored


def published(stored: Versions, version: int, nbytes: int = 64) -> Stored:
    """Publish a version whose bytes are its number."""
    data = bytes([version]) * nbytes
    manifest = lay_out([("w", "uint8", (nbytes,), digest(data))])
    key = VersionKey(Lineage(0), Version(version))
    staged = stored.stage(key, manifest.nbytes)
    stored.write(staged, 0, data)
    about = About(lineage=key.lineage, version=key.version, trainer_term=TrainerTerm(1), batch=None, manifest=manifest)
    stored.stored[key] = stored.keep(staged, about)
    stored.reach(stored.reached.run, key)
    return stored.stored[key]


def container(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give /dev/shm the 64 MB of a container."""

    def usage(folder: Path) -> SimpleNamespace:
        used = sum(file.stat().st_size for file in folder.iterdir())
        return SimpleNamespace(total=64 * MIB, used=used, free=64 * MIB - used)

    monkeypatch.setattr(shutil, "disk_usage", usage)


def numbers(stored: Versions) -> list[int]:
    return sorted(key.version for key in stored.stored)


def test_versions_lie_in_a_private_folder_and_survive_a_restart(disk: Path) -> None:
    first = opened(disk)
    path = published(first, 0).path
    assert path.parent == memory_folder.path_of(disk)
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert not list(disk.glob("*.bin"))
    again = opened(disk)
    assert numbers(again) == [0]
    assert again.read(again.stored[VersionKey(Lineage(0), Version(0))], 0, 64) == bytes(64)
    assert list(memory_folder.disk_folders()).count(disk.resolve()) == 1
    OPEN.pop(disk).close()
    memory_folder.remove(disk)
    assert not path.parent.exists()


def test_a_run_that_starts_meanwhile_sweeps_no_memory_that_is_being_opened(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = memory_folder.create

    def swept(folder: Path) -> Path:
        path = create(folder)
        sweep()
        return path

    monkeypatch.setattr(memory_folder, "create", swept)
    memory = open_memory(disk, MEMORY)
    assert memory is not None
    memory.close()


def test_a_folder_that_another_process_uses_is_neither_used_nor_cleared(disk: Path) -> None:
    """Two containers have run directories with one path, and share /dev/shm."""
    path = published(opened(disk), 0).path
    with pytest.raises(ConfigError, match=f'store is "memory"; another process uses {path.parent}, perhaps in a cont'):
        open_memory(disk, MEMORY)
    assert open_memory(disk, Parameters()) is None
    assert path.exists()


async def test_a_server_that_is_killed_serves_its_versions_again_from_memory(make_run: Callable[..., Run]) -> None:
    run = make_run(parameters={"store": "memory"})
    folder = memory_folder.path_of(run.run_dir / "parameters")
    run.scheduler()
    run.process("parameters")
    try:
        trainer = await run.trainer()
        await trainer.publish(0, WEIGHTS)
        assert files(run) == set()
        assert run.kill("parameters") == -9
        run.process("parameters")
        puller = Puller(run.where.parameters, worker=WorkerId("reader.1"))
        async with await puller.pull(Lineage(0), Version(0)) as pulled:
            np.testing.assert_array_equal(pulled.arrays()["embed"], WEIGHTS["embed"])
        puller.close()
        # A reboot empties the folder. The trainer publishes the version again, as the same one.
        assert run.kill("parameters") == -9
        shutil.rmtree(folder)
        run.process("parameters")
        assert await versions(run) == {}
        await trainer.publish(0, WEIGHTS)
        assert [*await versions(run)] == [0]
        assert (folder / "0-0.bin").exists()
    finally:
        memory_folder.remove(run.run_dir / "parameters")


async def test_a_server_that_was_started_by_hand_removes_its_memory_once_the_run_has_ended(
    make_run: Callable[..., Run],
) -> None:
    run = make_run(parameters={"store": "memory"})
    folder = memory_folder.path_of(run.run_dir / "parameters")
    run.scheduler()
    run.parameters()
    trainer = await run.trainer()
    await trainer.publish(0, WEIGHTS)
    await run.stop("parameters")
    assert folder.exists(), "another start may follow"
    run.parameters()
    await closed(run)
    await run.stop("parameters")
    assert not folder.exists()


@pytest.mark.parametrize("left", ["another run", "a later version"])
def test_what_another_run_left_in_memory_is_deleted(disk: Path, left: str) -> None:
    """The run directory was deleted and created anew, or restored from a backup."""
    first = opened(disk)
    published(first, 0)
    shutil.copytree(disk, disk.with_name("backup"))
    published(first, 1)
    shutil.rmtree(disk)
    if left == "a later version":
        shutil.copytree(disk.with_name("backup"), disk)
    again = opened(disk, run="b" if left == "another run" else "a")
    assert numbers(again) == []
    published(again, 0)
    assert numbers(opened(disk, run=again.reached.run)) == [0]


def test_versions_go_to_the_disk_where_memory_is_too_small(
    disk: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    container(monkeypatch)
    small = opened(disk, Parameters(keep_versions=2))
    assert published(small, 0, 12 * MIB).path.parent == memory_folder.path_of(disk)
    large = published(small, 1, 13 * MIB)
    assert large.path.parent == disk
    assert published(small, 2).path.parent == disk, "all further versions are in one place"
    assert "65 MiB for 5 versions of the weights are needed" in caplog.text
    assert caplog.text.count("stored on disk") == 1
    assert numbers(opened(disk, Parameters())) == [0, 1, 2]


def test_memory_that_is_required_and_too_small_is_refused_by_name(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    container(monkeypatch)
    with pytest.raises(ConfigError, match=r'store is "memory"; 65 MiB for 5 versions .* has 64 MiB: enlarge'):
        published(opened(disk), 0, 13 * MIB)


def test_a_version_is_never_in_two_places(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = opened(disk, Parameters())
    old = published(stored, 0).path
    monkeypatch.setattr("staleflow.servers.parameters.versions.available", lambda: 0)
    new = published(stored, 0).path
    assert (new.parent, old.exists(), old.with_suffix(".json").exists()) == (disk, False, False)
    assert numbers(opened(disk, Parameters())) == [0]


def test_files_may_be_deleted_while_the_free_memory_is_measured(disk: Path) -> None:
    """The deletion of old versions after a restart runs beside the first publish."""
    memory = open_memory(disk, Parameters())
    assert memory is not None
    files = [memory.folder / f"gone-{number}.part" for number in range(3000)]
    for file in files:
        file.touch()
    with ThreadPoolExecutor(1) as other:
        deleted = other.map(Path.unlink, files)
        assert memory.accepts(1)
        list(deleted)
    memory.close()


def test_required_memory_that_is_full_for_now_lets_the_publish_wait(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = opened(disk)
    monkeypatch.setattr("staleflow.servers.parameters.versions.available", lambda: 0)
    with pytest.raises(NoRoom, match="0 bytes are free"):
        published(stored, 0)


def test_auto_uses_half_of_the_free_memory_at_most(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("staleflow.servers.parameters.memory.available", lambda: 9 * MIB)
    assert published(opened(disk, Parameters()), 0, MIB).path.parent == disk
    monkeypatch.setattr("staleflow.servers.parameters.memory.available", lambda: 10 * MIB)
    assert published(opened(disk, Parameters()), 1, MIB).path.parent == memory_folder.path_of(disk)


@pytest.mark.parametrize("how", ["another user", "readable by others", "a link", "no shared memory"])
def test_a_folder_that_is_not_this_users_alone_is_not_used(
    disk: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    path = memory_folder.path_of(disk)
    if how == "no shared memory":
        monkeypatch.setattr(memory_folder, "SHARED_MEMORY", disk.parent)
    elif how == "a link":
        path.symlink_to(disk.parent)
    else:
        path.mkdir(mode=0o755 if how == "readable by others" else 0o700)
    if how == "another user":
        if os.getuid() != 0:
            pytest.skip("only root can give a folder away")
        os.chown(path, 12345, 12345)
    why = f"{disk.parent} is not in memory" if how == "no shared memory" else f"{path} belongs to another user"
    with pytest.raises(ConfigError, match=f'parameters.store is "memory"; {why}'):
        open_memory(disk, Parameters(store="memory"))
    assert open_memory(disk, Parameters()) is None
    assert published(Versions(disk, durability="process"), 0).path.parent == disk


def test_versions_that_must_survive_a_power_failure_lie_on_disk(disk: Path) -> None:
    assert open_memory(disk, Parameters(durability="power")) is None
    assert open_memory(disk, Parameters(store="disk")) is None
    assert not memory_folder.path_of(disk).exists()
