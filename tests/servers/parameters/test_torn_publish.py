"""No reader sees a mixture of two versions, even if a publish is torn anywhere and readers are slow or die.

Every value of version ``v`` is a function of ``v`` and of its position, so a reader can compute the expected values.
"""

import os
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from threading import Barrier
from typing import Any

import numpy as np
import pytest

from staleflow.clients.weights import Puller
from staleflow.net.errors import Refused
from staleflow.protocols.consistency.ids import Lineage, TrainerTerm, Version, WorkerId
from staleflow.protocols.wire.manifest import digest, lay_out
from staleflow.protocols.wire.messages import Chunk, GetChunk, GetManifest, Manifest, ManifestReply
from staleflow.protocols.wire.tensors import Array
from staleflow.servers.parameters.versions import About, Staged, Stored, VersionKey, Versions
from tests.servers.running import Run, eventually, produced

TEARS = 100
SIZES = (700, 0, 3, 4_000)
"""Number of values in each tensor of a version."""
PIECE = 5_000
SEED = 4


def weights(version: int) -> dict[str, Array]:
    """Weights of a version, computable from its number."""
    return {
        f"layer{number}": np.arange(size, dtype=np.int32) * 7919 + 97 * version + number
        for number, size in enumerate(SIZES)
    }


def version_of(arrays: Mapping[str, Array]) -> int:
    """Return the version of these arrays; fail if they belong to no version, or to several."""
    version = (int(arrays["layer2"][0]) - 2) // 97
    for name, array in weights(version).items():
        np.testing.assert_array_equal(arrays[name], array)
    return version


def laid_out(version: int) -> tuple[Manifest, bytes]:
    """Manifest and bytes of a version."""
    named = weights(version)
    described = [(n, "int32", array.shape, digest(array.tobytes())) for n, array in named.items()]
    manifest = lay_out(described)
    data = bytearray(manifest.nbytes)
    for entry in manifest.tensors:
        data[entry.offset : entry.offset + entry.nbytes] = named[entry.name].tobytes()
    return manifest, bytes(data)


def taken_apart(manifest: Manifest, data: bytes) -> dict[str, Array]:
    return {
        entry.name: np.frombuffer(data[entry.offset : entry.offset + entry.nbytes], np.int32).reshape(entry.shape)
        for entry in manifest.tensors
    }


def publish(versions: Versions, version: int) -> Stored:
    """Make the same changes to the folder as the server does, from the first byte to the last rename."""
    manifest, data = laid_out(version)
    about = About(
        lineage=Lineage(0), version=Version(version), trainer_term=TrainerTerm(1), batch=None, manifest=manifest
    )
    staged = versions.stage(about.key, manifest.nbytes)
    for entry in manifest.tensors:  # as publishers do: without padding between tensors
        end = entry.offset + entry.nbytes
        for start in range(entry.offset, end, PIECE):
            versions.write(staged, start, data[start : min(start + PIECE, end)])
    stored = versions.keep(staged, about)
    versions.stored[about.key] = stored
    return stored


class Killed(BaseException):
    """Simulates the death of the process."""


class Tear:
    """End the process at the ``at``-th change of the folder, with the change complete, half complete or not started."""

    def __init__(self, patched: pytest.MonkeyPatch, at: int, random: Random) -> None:
        self.changes, self._at, self._random = 0, at, random
        for name in ("unlink", "replace", "chmod"):
            patched.setattr(Path, name, self._whole(getattr(Path, name)))
        patched.setattr(os, "posix_fallocate", self._whole(os.posix_fallocate))
        pwrite, write_bytes = os.pwrite, Path.write_bytes

        def half_pwrite(descriptor: int, data: Any, offset: int) -> int:
            return self._half(lambda part: pwrite(descriptor, part, offset), bytes(data))

        def half_write_bytes(path: Path, data: bytes) -> int:
            return self._half(lambda part: write_bytes(path, part), data)

        patched.setattr(os, "pwrite", half_pwrite)
        patched.setattr(Path, "write_bytes", half_write_bytes)

    def _whole(self, change: Callable[..., Any]) -> Callable[..., Any]:
        def torn(*args: Any, **kwargs: Any) -> Any:
            self.changes += 1
            if self.changes == self._at and self._random.random() < 0.5:
                raise Killed
            done = change(*args, **kwargs)
            if self.changes == self._at:
                raise Killed
            return done

        return torn

    def _half(self, write: Callable[[bytes], int], data: bytes) -> int:
        self.changes += 1
        if self.changes == self._at:
            write(data[: self._random.randrange(len(data) + 1)])
            raise Killed
        return write(data)


def found(folder: Path) -> dict[int, int]:
    """Map each version that a restarted server finds in the folder to the version that its bytes belong to."""
    versions = Versions(folder, durability="process")
    seen: dict[int, int] = {}
    for key, stored in versions.stored.items():
        versions.verify(stored)
        data = versions.read(stored, 0, stored.about.manifest.nbytes)
        seen[key.version] = version_of(taken_apart(stored.about.manifest, data))
    assert {path.suffix for path in folder.iterdir()} <= {".bin", ".json"}  # no partial file remains
    return seen


def changes_of_a_publish(folder: Path) -> int:
    with pytest.MonkeyPatch.context() as patched:
        whole = Tear(patched, at=0, random=Random(0))
        publish(Versions(folder, durability="process"), 1)
    return whole.changes


def test_a_publish_torn_anywhere_is_whole_or_not_there(tmp_path: Path) -> None:
    random, changes = Random(SEED), changes_of_a_publish(tmp_path / "whole")
    outcomes: Counter[str] = Counter()
    for number in range(TEARS):
        folder = tmp_path / str(number)
        publish(Versions(folder, durability="process"), 1)
        versions = Versions(folder, durability="process")
        at = random.randint(1, changes)
        with pytest.MonkeyPatch.context() as patched:
            Tear(patched, at, random)
            with pytest.raises(Killed):
                publish(versions, 2)
        seen = found(folder)
        assert seen in ({1: 1}, {1: 1, 2: 2}), f"seed {SEED}, tear {number} at change {at}"
        outcomes["whole" if 2 in seen else "not there"] += 1
        publish(Versions(folder, durability="process"), 2)  # the trainer retries
        assert found(folder) == {1: 1, 2: 2}
    assert min(outcomes["whole"], outcomes["not there"]) > 2, outcomes


def test_other_bytes_in_place_of_a_corrupt_version_are_whole_or_not_there(tmp_path: Path) -> None:
    random, changes = Random(SEED), changes_of_a_publish(tmp_path / "whole")
    outcomes: Counter[bool] = Counter()
    for number in range(40):
        folder = tmp_path / str(number)
        stored = publish(Versions(folder, durability="process"), 1)
        stored.path.chmod(0o644)
        stored.path.write_bytes(b"x" * stored.about.manifest.nbytes)
        versions = Versions(folder, durability="process")
        with pytest.MonkeyPatch.context() as patched:
            Tear(patched, random.randint(changes - 8, changes), random)
            with pytest.raises(Killed):
                publish(versions, 1)
        left = Versions(folder, durability="process")
        if (again := left.stored.get(VersionKey(Lineage(0), Version(1)))) is not None:
            data = left.read(again, 0, again.about.manifest.nbytes)
            assert data == b"x" * len(data) or version_of(taken_apart(again.about.manifest, data)) == 1
        outcomes[again is not None] += 1
    assert min(outcomes[True], outcomes[False]) > 2, outcomes


def recycling(folder: Path) -> Versions:
    """Return a folder with version 1 and a spare file that was version 0."""
    versions = Versions(folder, durability="process")
    publish(versions, 0)
    publish(versions, 1)
    versions.remove(versions.put_aside(VersionKey(Lineage(0), Version(0)), reuse=True))
    assert {path.name for path in folder.iterdir()} == {"0-1.bin", "0-1.json", "spare.part"}
    spare = folder / "spare.part"
    spare.chmod(0o644)
    spare.write_bytes(b"x" * spare.stat().st_size)
    return versions


def test_of_two_versions_that_begin_at_once_one_gets_the_spare_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both uploads see the spare file before either takes it."""
    versions, both, chmod = recycling(tmp_path), Barrier(2), Path.chmod

    def together(path: Path, mode: int) -> None:
        if path.name == "spare.part":
            both.wait(60)
        chmod(path, mode)

    def begin(version: int) -> Staged:
        return versions.stage(VersionKey(Lineage(0), Version(version)), laid_out(version)[0].nbytes)

    monkeypatch.setattr(Path, "chmod", together)
    with ThreadPoolExecutor(2) as threads:
        staged = list(threads.map(begin, (2, 3)))
    assert sorted(one.recycled for one in staged) == [False, True]
    assert [one.path.stat().st_size for one in staged] == [laid_out(version)[0].nbytes for version in (2, 3)]
    assert staged[0].path != staged[1].path


def test_a_spare_file_with_holes_gets_its_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulates a memory file system, where the server allocates no space again for a file that has it."""

    def memory(_: int) -> str:
        return "tmpfs"

    monkeypatch.setattr("staleflow.servers.parameters.versions.file_system", memory)
    versions, spare = recycling(tmp_path), tmp_path / "spare.part"
    nbytes = 64 * spare.stat().st_blksize
    os.truncate(spare, nbytes)
    staged = versions.stage(VersionKey(Lineage(0), Version(2)), nbytes)
    assert staged.recycled
    assert staged.path.stat().st_blocks * 512 >= nbytes


def test_a_version_written_over_an_old_one_is_whole_or_not_there_wherever_it_is_torn(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patched:
        versions = recycling(tmp_path / "whole")
        spare = (tmp_path / "whole" / "spare.part").stat().st_ino
        whole = Tear(patched, at=0, random=Random(0))
        publish(versions, 2)
    assert (tmp_path / "whole" / "0-2.bin").stat().st_ino == spare
    fresh = publish(Versions(tmp_path / "fresh", durability="process"), 2)
    assert (tmp_path / "whole" / "0-2.bin").read_bytes() == fresh.path.read_bytes()  # zeros between tensors as well
    random = Random(SEED)
    for at in range(1, whole.changes + 1):
        folder = tmp_path / str(at)
        versions = recycling(folder)
        with pytest.MonkeyPatch.context() as patched:
            Tear(patched, at, random)
            with pytest.raises(Killed):
                publish(versions, 2)
        assert found(folder) in ({1: 1}, {1: 1, 2: 2}), f"seed {SEED}, change {at}"


async def test_a_slow_reader_gets_one_version_while_others_are_published_and_deleted(
    make_run: Callable[..., Run],
) -> None:
    run = make_run(parameters={"keep_versions": 1, "chunk_kb": 1})
    for start in (run.scheduler, run.trajectories, run.parameters):
        start()
    trainer = await run.trainer()
    await trainer.publish(0, weights(0))
    slow, reader = WorkerId("slow.1"), WorkerId("quick.1")
    client, quick = run.client(run.where.parameters, slow), Puller(run.where.parameters, worker=reader)
    data, manifest = bytearray(), Manifest(tensors=[], nbytes=0, sha="")
    seen: list[int] = []
    async with produced(run):
        for step in range(6):
            batch = await trainer.next_batch(step)
            await trainer.publish(step + 1, weights(step + 1), batch.batch)
            async with await quick.pull(Lineage(0), Version(step + 1)) as pulled:
                seen.append(version_of(pulled.arrays()))
            if step == 0:
                ask = GetManifest(worker=slow, lineage=Lineage(0), version=Version(1))
                manifest = (await client.ask(ask, ManifestReply)).manifest
            reply, frames = await client.call(
                GetChunk(lineage=Lineage(0), version=Version(1), offset=len(data), nbytes=manifest.nbytes)
            )
            assert isinstance(reply, Chunk)
            data += frames[0]
    while len(data) < manifest.nbytes:
        _, frames = await client.call(
            GetChunk(lineage=Lineage(0), version=Version(1), offset=len(data), nbytes=manifest.nbytes)
        )
        data += frames[0]
    assert seen == [1, 2, 3, 4, 5, 6]
    assert version_of(taken_apart(manifest, bytes(data))) == 1
    quick.close()


async def test_a_dead_readers_version_is_deleted_and_never_served_to_anybody_as_another(
    make_run: Callable[..., Run],
) -> None:
    run = make_run(parameters={"keep_versions": 1})
    for start in (run.scheduler, run.trajectories, run.parameters):
        start()
    trainer = await run.trainer()
    await trainer.publish(0, weights(0))
    async with produced(run):
        batch = await trainer.next_batch(0)
        await trainer.publish(1, weights(1), batch.batch)
        dead = Puller(run.where.parameters, worker=WorkerId("dead.1"))
        mapped = await dead.pull(Lineage(0), Version(1))
        dead.close()
        for step in range(1, 5):
            batch = await trainer.next_batch(step)
            await trainer.publish(step + 1, weights(step + 1), batch.batch)

    async def deleted() -> bool:
        listed = (await run.status(run.where.parameters))["versions"]
        return 1 not in [version["version"] for version in listed]

    assert await eventually(deleted)
    assert version_of(mapped.arrays()) == 1  # the mapped bytes have not changed
    late = Puller(run.where.parameters, worker=WorkerId("late.1"))
    with pytest.raises(Refused, match="version 1 of lineage 0 is not here"):
        await late.pull(Lineage(0), Version(1))
    async with await late.pull(Lineage(0), Version(5)) as newest:
        assert version_of(newest.arrays()) == 5
    late.close()


async def test_a_version_that_goes_while_it_is_read_is_refused_and_the_server_goes_on(run: Run) -> None:
    trainer = await run.trainer()
    await trainer.publish(0, weights(0))
    (run.run_dir / "parameters" / "0-0.bin").unlink()
    client = run.client(run.where.parameters, WorkerId("reader.1"))
    for _ in range(2):
        with pytest.raises(Refused, match="is gone"):
            await client.call(GetChunk(lineage=Lineage(0), version=Version(0), offset=0, nbytes=4))
