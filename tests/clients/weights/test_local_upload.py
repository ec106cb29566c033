"""A publisher writes the server's file itself, from the second version on through a map, with the right bytes each
time."""

import asyncio
import errno
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from staleflow.clients.weights import NamedTensors, local_upload, publish
from staleflow.clients.weights import mmap_cache as kept_maps
from staleflow.clients.weights.local_upload import ServerFiles
from staleflow.clients.weights.mapped import Maps
from staleflow.clients.weights.tensors import layout, tensor_of
from staleflow.process.host import boot_id, file_system
from staleflow.protocols.wire.manifest import digest
from staleflow.protocols.wire.messages import BeginPublishReply, Manifest, ManifestReply
from staleflow.protocols.wire.tensors import Array
from tests.clients.weights.opened import open_files
from tests.servers.running import WEIGHTS, Run


def made(seed: int, rows: int = 300) -> dict[str, Array]:
    random = np.random.default_rng(seed)
    return {
        "a": random.random((rows, 1000), dtype=np.float32),
        "empty": np.zeros((0, 4), np.float32),
        "b": random.integers(0, 2**16, 30_001, dtype=np.uint16),
    }


class Gathered:
    """Weights that are never in memory all at once; the second tensor arrives when ``go`` is set."""

    def __init__(self, weights: dict[str, Array], *, waits: bool = False) -> None:
        self._weights = weights
        self.begun, self.go = threading.Event(), threading.Event()
        if not waits:
            self.go.set()

    def items(self) -> Iterator[tuple[str, Array]]:
        for number, one in enumerate(self._weights.items()):
            if number == 1:
                self.begun.set()
                assert self.go.wait(60)
            yield one


class File:
    """A file of the server, written by a publisher."""

    def __init__(self, path: Path, files: ServerFiles) -> None:
        self.path = path
        self.files = files

    def write(self, weights: dict[str, Array], *, gathered: bool = False) -> None:
        """Write one version and check that the file holds it."""
        places = layout(weights)
        digests = self.put(places, Gathered(weights) if gathered else weights)
        stored = self.path.read_bytes()
        assert len(stored) == places.nbytes
        for entry, (name, array) in zip(places.tensors, weights.items(), strict=True):
            assert stored[entry.offset : entry.offset + entry.nbytes] == array.tobytes(), name
        assert digests == [digest(tensor_of(name, array).data) for name, array in weights.items()]

    def put(self, places: Manifest, weights: NamedTensors, given_up: threading.Event | None = None) -> list[str] | None:
        with self.path.open("ab") as file:
            file.truncate(places.nbytes)
        to = BeginPublishReply(upload=1, path=str(self.path), host=boot_id())
        return self.files.write(to, places, weights, given_up or threading.Event())

    @property
    def mapped(self) -> bool:
        """True while this process maps the file; a file of another file system may have the same inode number."""
        inode = f" {self.path.stat().st_ino} "
        return any(inode in line and str(self.path) in line for line in maps().splitlines())


def maps() -> str:
    """The memory maps of this process."""
    return Path("/proc/self/maps").read_text()


def on(kind: str) -> Callable[[int], str]:
    """Report every file as on a file system of that type."""

    def of_any(_: int) -> str:
        return kind

    return of_any


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[File]:
    monkeypatch.setattr(local_upload, "file_system", on("ext4"))
    monkeypatch.setattr(local_upload, "PIECE_BYTES", 100_000)
    files = ServerFiles()
    yield File(tmp_path / "upload.part", files)
    files.close()


@pytest.mark.parametrize("gathered", [False, True])
def test_a_file_is_mapped_when_it_is_written_again(file: File, gathered: bool) -> None:
    for seed in range(4):
        file.write(made(seed), gathered=gathered)
        assert file.mapped is (seed > 0)


def test_a_file_that_is_renamed_stays_mapped_and_one_of_the_same_name_is_another(file: File) -> None:
    for seed in range(2):
        file.write(made(seed))
    kept = file.path.rename(file.path.with_name("0-1.bin"))
    before = kept.read_bytes()
    for seed in range(2, 5):
        file.write(made(seed))
    assert kept.read_bytes() == before
    kept.replace(file.path)
    file.write(made(5))


def test_a_version_of_another_size_has_its_own_map(file: File) -> None:
    for rows in (200, 200, 300, 300, 200):
        file.write(made(rows, rows))


def test_a_file_in_place_of_a_deleted_one_is_new(file: File) -> None:
    for seed in range(3):
        file.write(made(seed))
        assert not file.mapped
        file.path.unlink()


def test_only_the_last_files_are_kept_and_nothing_after_the_end(
    file: File, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_maps, "MAX_FILES", 2)
    others = [File(tmp_path / f"{number}.part", file.files) for number in range(4)]
    for seed in range(3):
        for other in others:
            other.write(made(seed))
    assert [other.mapped for other in others] == [False] * 4  # each was evicted before its next turn
    assert open_files(tmp_path) == 2
    others[-2].write(made(3))  # one of the last two
    assert (others[-2].mapped, open_files(tmp_path)) == (True, 3)
    file.files.close()
    assert (others[-2].mapped, open_files(tmp_path)) == (False, 0)
    for other in others * 2:
        other.write(made(4))
    assert open_files(tmp_path) == 0


def test_a_publish_that_was_given_up_writes_no_more_and_another_waits_for_that(file: File) -> None:
    for seed in range(2):
        file.write(made(seed))
    places, given_up = layout(made(2)), threading.Event()
    first, second = Gathered(made(2), waits=True), Gathered(made(3))
    with ThreadPoolExecutor(2) as threads:
        writing = threads.submit(file.put, places, first, given_up)
        assert first.begun.wait(60)
        other = threads.submit(file.put, places, second)
        assert not second.begun.wait(0.2)
        given_up.set()
        first.go.set()
        assert writing.result() is None
        assert other.result() is not None
    assert file.path.read_bytes()[places.tensors[2].offset :].startswith(made(3)["b"].tobytes())


async def test_a_publish_that_is_cancelled_writes_no_more(run: Run) -> None:
    trainer = await run.trainer()
    await trainer.publish(0, made(0))
    weights, places = Gathered(made(1), waits=True), layout(made(1))
    publishing = asyncio.ensure_future(trainer.publish(1, weights))
    await asyncio.to_thread(weights.begun.wait, 60)
    publishing.cancel()
    await asyncio.wait((publishing,))
    weights.go.set()
    files = trainer.publisher._files  # pyright: ignore[reportPrivateUsage]
    with files._writing:  # pyright: ignore[reportPrivateUsage]
        (upload,) = (run.run_dir / "parameters").glob("upload-*.part")
        stored = upload.read_bytes()
    first, last = (made(1)[name].tobytes() for name in "ab")
    assert stored.startswith(first)
    assert stored[places.tensors[2].offset :][: len(last)] == bytes(len(last))


def test_what_went_to_the_disk_is_not_mapped(file: File, monkeypatch: pytest.MonkeyPatch) -> None:
    def not_now(*_: object) -> int:
        raise BlockingIOError

    file.write(made(0))
    with monkeypatch.context() as patched:
        patched.setattr(os, "preadv", not_now)
        file.write(made(1))
        assert not file.mapped
    file.write(made(2))
    assert file.mapped


def test_nothing_is_mapped_where_a_full_disk_would_end_the_process(file: File, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_upload, "file_system", on("btrfs"))
    for seed in range(3):
        file.write(made(seed))
        assert not file.mapped


def test_a_file_that_was_not_written_to_its_end_is_not_mapped(file: File, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        with pytest.raises(OSError, match="No space left on device"):
            file.write(made(0))
    file.write(made(1))
    assert not file.mapped
    file.write(made(2))
    assert file.mapped


def test_where_no_map_can_be_had_it_is_written_all_the_same(file: File, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*_: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "dup", none_left)
    for seed in range(3):
        file.write(made(seed))
        assert not file.mapped


async def test_a_publisher_that_waits_for_room_keeps_none_of_what_is_deleted(
    run: Run, file: File, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publish, "POLL_INTERVAL_S", 0.01)
    trainer = await run.trainer()
    publisher, asked = trainer.publisher, asyncio.Event()
    monkeypatch.setattr(publisher, "_files", file.files)
    for seed in range(2):
        file.write(made(seed))
    kept = str(file.path)
    assert kept in maps()

    async def no_room(*_: object, **__: object) -> None:
        asked.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(publisher._client, "ask", no_room)  # pyright: ignore[reportPrivateUsage]
    waiting = asyncio.ensure_future(trainer.publish(0, WEIGHTS))
    await asked.wait()
    file.path.unlink()
    async with asyncio.timeout(20):
        while kept in maps():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    waiting.cancel()


def test_a_reader_keeps_none_of_what_is_deleted_when_it_maps_the_next(file: File, tmp_path: Path) -> None:
    following = File(tmp_path / "next.bin", file.files)
    reader = Maps()
    for seed, one in enumerate((file, following)):
        one.write(made(seed))
        found = ManifestReply(manifest=layout(made(seed)), path=str(one.path), host=boot_id())
        assert reader.map(found) is not None  # without any remaining view of it
        assert one.mapped
        if one is file:
            file.path.unlink()
    assert str(file.path) not in maps()
    reader.close()
    assert str(tmp_path) not in maps()


def test_the_type_of_a_file_system_is_told() -> None:
    assert file_system(Path("/proc").stat().st_dev) == "proc"
    assert file_system(os.makedev(4095, 77)) == ""
