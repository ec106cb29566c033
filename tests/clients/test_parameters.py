"""Weights published and pulled: mapped or in chunks they are the same bytes, or there is an error."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from staleflow.clients import parameters
from staleflow.clients.parameters import CorruptWeights, PulledVersion, Puller
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.consistency.ids import Lineage, Version, WorkerId
from staleflow.protocols.wire.tensors import Array
from staleflow.runtime.errors import Refused
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
    """Clients that are on another host than the server, and use small chunks."""
    monkeypatch.setattr(parameters, "boot_id", lambda: "another host")
    monkeypatch.setattr(parameters, "CHUNK_BYTES", 100_000)


def reader(run: Run) -> Puller:
    puller = Puller(run.where.parameters, worker=WorkerId("reader.1"))
    run.clients.append(puller)
    return puller


def rot(path: Path) -> None:
    """Another first byte, by nobody's hand: size and time of the file stay."""
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
    mapped = path.read_bytes()
    monkeypatch.setattr(parameters, "boot_id", lambda: "another host")
    path.chmod(0o644)
    path.write_bytes(mapped[:-1])
    with pytest.raises(Refused, match="corrupt"):
        await reader(run).pull(Lineage(0), Version(0))
    await trainer.publish(0, LARGE)
    assert path.read_bytes() == mapped


class OneByOne:
    """Weights of which one tensor is in memory at a time: the one before is overwritten."""

    def __init__(self) -> None:
        self.passes = 0

    def items(self) -> Iterator[tuple[str, Array]]:
        self.passes += 1
        for name, array in LARGE.items():
            lent = array.copy()
            yield name, lent
            lent[...] = 0


@pytest.mark.parametrize("host", ["this", "another host"])
async def test_weights_that_are_gathered_one_by_one_are_gone_through_twice_and_never_held(
    run: Run, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    if host != "this":
        monkeypatch.setattr(parameters, "boot_id", lambda: host)
    trainer, weights = await run.trainer(), OneByOne()
    await trainer.publish(0, weights)
    assert weights.passes == 2
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
    status = await run.status(run.where.parameters)
    assert [version["pinned_by"] for version in status["versions"]] == [[]]


async def test_a_dtype_that_may_not_travel_is_refused_by_name(run: Run) -> None:
    trainer = await run.trainer()
    with pytest.raises(ValueError, match="tensor w is complex64"):
        await trainer.publish(0, {"w": np.zeros(3, np.complex64)})
