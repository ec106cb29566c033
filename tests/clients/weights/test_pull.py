"""Published and pulled weights are the same bytes, mapped or in chunks, or the pull raises an error."""

import errno
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from staleflow.clients.weights import CorruptWeights, NamedTensors, PulledVersion, Puller, chunks, mapped
from staleflow.clients.weights import local_upload as written
from staleflow.clients.weights.local_upload import ServerFiles
from staleflow.net.errors import Refused
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.consistency.ids import Lineage, Version, WorkerId
from staleflow.protocols.wire.messages import BeginPublishReply, Manifest
from staleflow.protocols.wire.tensors import Array
from tests.servers.running import WEIGHTS, Run, Trainer

LARGE: dict[str, Array] = {
    "a": np.random.default_rng(0).random((700, 1000), dtype=np.float32),
    "empty": np.zeros((0, 4), np.float32),
    "b": np.random.default_rng(1).integers(0, 2**16, 300_001, dtype=np.uint16),
    "flags": np.asarray([True, False]),
    "steps": np.arange(5, dtype=np.int64),
}


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put clients on another host than the server, with small chunks."""
    monkeypatch.setattr(mapped, "boot_id", lambda: "another host")
    monkeypatch.setattr(written, "boot_id", lambda: "another host")
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 100_000)


def reader(run: Run) -> Puller:
    puller = Puller(run.where.parameters, worker=WorkerId("reader.1"))
    run.clients.append(puller)
    return puller


def rot(path: Path) -> None:
    """Change the first byte as bit rot does: size and time of the file stay."""
    stored, seen = path.read_bytes(), path.stat()
    path.chmod(0o644)
    path.write_bytes(bytes([stored[0] ^ 1]) + stored[1:])
    os.utime(path, ns=(seen.st_atime_ns, seen.st_mtime_ns))


async def published(run: Run, weights: dict[str, Array]) -> Trainer:
    trainer = await run.trainer()
    assert (await trainer.publish(0, weights)).version == 0
    return trainer


def same(pulled: PulledVersion, weights: dict[str, Array]) -> None:
    found = pulled.arrays()
    assert list(found) == list(weights)
    for name, array in weights.items():
        np.testing.assert_array_equal(found[name], array)
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
        assert not found[name].flags.writeable


async def test_a_mapped_version_is_what_was_published(run: Run) -> None:
    await published(run, LARGE)
    async with await reader(run).pull(Lineage(0), Version(0)) as pulled:
        same(pulled, LARGE)
        assert pulled.mapped
        assert pulled.tensors()["b"].dtype == "bfloat16"
        assert pulled.tensors()["b"].data.nbytes == 600_002


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("chunk_kb", [64, 4096])
async def test_chunks_are_the_same_bytes_as_the_mapped_file(make_run: Callable[..., Run], chunk_kb: int) -> None:
    run = make_run(parameters={"chunk_kb": chunk_kb, "durability": "power"})
    run.scheduler()
    run.parameters()
    await published(run, LARGE)
    async with await reader(run).pull(Lineage(0), Version(0)) as pulled:
        same(pulled, LARGE)
        assert not pulled.mapped


async def test_both_ways_of_publishing_give_the_same_file(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = await published(run, LARGE)
    path = run.run_dir / "parameters" / "0-0.bin"
    written = path.read_bytes()
    monkeypatch.setattr(mapped, "boot_id", lambda: "another host")
    path.chmod(0o644)
    path.write_bytes(written[:-1])
    with pytest.raises(Refused, match="corrupt"):
        await reader(run).pull(Lineage(0), Version(0))
    await trainer.publish(0, LARGE)
    assert path.read_bytes() == written


class OneByOne:
    """Weights of which only one tensor is in memory at a time: each overwrites the one before."""

    def __init__(self) -> None:
        self.passes = 0

    def items(self) -> Iterator[tuple[str, Array]]:
        self.passes += 1
        for name, array in LARGE.items():
            lent = array.copy()
            yield name, lent
            lent[...] = 0


@pytest.mark.parametrize("host", ["this", "another host"])
async def test_weights_that_are_gathered_one_by_one_are_gone_through_once_a_version_and_never_held(
    run: Run, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    if host != "this":
        monkeypatch.setattr(written, "boot_id", lambda: host)
    trainer, weights = await run.trainer(), OneByOne()
    await trainer.publish(0, weights)
    assert weights.passes == 2  # the first pass also reads the shapes
    await trainer.publish(0, weights)
    assert weights.passes == 3
    async with await reader(run).pull(Lineage(0), Version(0)) as pulled:
        same(pulled, LARGE)


async def test_a_version_that_is_not_there_is_refused(run: Run) -> None:
    await published(run, WEIGHTS)
    with pytest.raises(Refused) as no:
        await reader(run).pull(Lineage(0), Version(9))
    assert no.value.code is Code.BAD_VERSION


async def test_a_closed_version_has_no_tensors(run: Run) -> None:
    await published(run, WEIGHTS)
    pulled = await reader(run).pull(Lineage(0), Version(0))
    await pulled.close()
    await pulled.close()
    with pytest.raises(ValueError, match="version 0 is closed"):
        pulled.tensors()


async def test_arrays_stay_readable_after_their_version_is_closed_and_deleted(run: Run) -> None:
    await published(run, WEIGHTS)
    async with await reader(run).pull(Lineage(0), Version(0)) as pulled:
        embed = pulled.arrays()["embed"]
    (run.run_dir / "parameters" / "0-0.bin").unlink()
    np.testing.assert_array_equal(embed, WEIGHTS["embed"])


async def test_a_reader_finds_what_the_server_did_not_see(run: Run) -> None:
    await published(run, WEIGHTS)
    rot(run.run_dir / "parameters" / "0-0.bin")
    with pytest.raises(CorruptWeights, match="tensor embed"):
        await reader(run).pull(Lineage(0), Version(0))
    (version,) = (await run.status(run.where.parameters))["versions"]
    assert version["pinned_by"] == []


async def test_what_a_reader_finds_corrupt_the_server_looks_at_and_takes_again(run: Run) -> None:
    trainer = await published(run, WEIGHTS)
    rot(run.run_dir / "parameters" / "0-0.bin")
    with pytest.raises(CorruptWeights):
        await reader(run).pull(Lineage(0), Version(0))
    assert await trainer.publisher.damaged(Lineage(0), Version(0))
    assert await trainer.publisher.damaged(Lineage(0), Version(1)), "what is not there is lost"
    with pytest.raises(Refused, match="corrupt"):
        await reader(run).pull(Lineage(0), Version(0))
    await trainer.publish(0, WEIGHTS)
    assert not await trainer.publisher.damaged(Lineage(0), Version(0))
    async with await reader(run).pull(Lineage(0), Version(0)) as pulled:
        same(pulled, WEIGHTS)


@pytest.mark.usefixtures("elsewhere")
async def test_a_far_reader_lets_go_of_a_version_that_the_server_cannot_read(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    await published(run, WEIGHTS)

    def broken(*_: object) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "pread", broken)
    with pytest.raises(Refused, match="Input/output error"):
        await reader(run).pull(Lineage(0), Version(0))
    (version,) = (await run.status(run.where.parameters))["versions"]
    assert (version["pinned_by"], "Input/output error" in version["corrupt"]) == ([], True)


async def test_bytes_that_were_not_written_as_their_digests_say_are_served_to_nobody(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = await run.trainer()
    write = ServerFiles.write

    def torn(
        self: ServerFiles, to: BeginPublishReply, places: Manifest, weights: NamedTensors, given_up: threading.Event
    ) -> list[str] | None:
        digests = write(self, to, places, weights, given_up)
        with Path(to.path).open("r+b") as file:
            file.write(b"?")
        return digests

    with monkeypatch.context() as patched:
        patched.setattr(ServerFiles, "write", torn)
        await trainer.publish(0, WEIGHTS)
    for found in (CorruptWeights, Refused):  # the reader finds the damage, after which the server knows it
        with pytest.raises(found):
            await reader(run).pull(Lineage(0), Version(0))
    await trainer.publish(0, WEIGHTS)
    async with await reader(run).pull(Lineage(0), Version(0)) as pulled:
        same(pulled, WEIGHTS)


class Changing:
    """Weights whose second tensor has another shape each time."""

    def __init__(self) -> None:
        self._size = 0

    def items(self) -> Iterator[tuple[str, Array]]:
        self._size += 1
        yield "a", np.zeros(4, np.float32)
        yield "b", np.zeros((self._size, 2), np.float32)


@pytest.mark.parametrize("host", ["this", "another host"])
async def test_weights_that_change_their_shapes_on_the_way_are_no_version(
    run: Run, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    if host != "this":
        monkeypatch.setattr(written, "boot_id", lambda: host)
    trainer = await run.trainer()
    with pytest.raises(ValueError, match=r"unexpected tensor \('b', 'float32', \(2, 2\)\); .* was announced"):
        await trainer.publish(0, Changing())
    assert (await run.status(run.where.parameters))["versions"] == []
    assert (await trainer.publish(0, WEIGHTS)).version == 0


async def test_a_dtype_that_may_not_travel_is_refused_by_name(run: Run) -> None:
    trainer = await run.trainer()
    with pytest.raises(ValueError, match="tensor w is complex64"):
        await trainer.publish(0, {"w": np.zeros(3, np.complex64)})
