"""Only the payloads in a changed or lost slab file of a simulated disk count as damaged."""

import random
from pathlib import Path

import pytest

from staleflow.protocols.consistency.ids import GroupId, LeaseId, WorkerId
from staleflow.protocols.wire.payload_digest import payload_digest
from staleflow.servers.trajectories import slabs as slab_files
from staleflow.servers.trajectories.records import Key, Pushed, Record
from staleflow.servers.trajectories.slabs import Slabs
from staleflow.servers.trajectories.store import TABLES, TrajectoryStore
from staleflow.sim.faults.disk import Disk, Loss
from staleflow.sim.virtual import Conductor, Process

BLOB_BYTES = 600
SLAB_BYTES = 1024
"""Size that one payload fills."""


def pushed(number: int) -> Pushed:
    blob = bytes([number]) * BLOB_BYTES
    record = Record(
        worker=WorkerId("w.1"),
        sha=payload_digest((blob,)),
        nbytes=BLOB_BYTES,
        truncated=False,
        segments=[],
        samples=[],
        tokens=0,
        prompt_tokens=0,
    )
    return Pushed(Key(GroupId(number), LeaseId(number)), record, blob)


def opened(disk: Disk, folder: Path) -> TrajectoryStore:
    process = Process(Conductor(), "shard")
    process.loop.close()
    store = disk.opener(process)(folder, tables=TABLES, map_bytes=1 << 20, durability="power")
    return TrajectoryStore(store, map_bytes=1 << 20, slabs=Slabs(folder, map_bytes=1 << 20), sync=True)


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Disk:
    """A disk with two payloads, each in its own slab."""
    monkeypatch.setattr(slab_files, "MIN_SLAB_BYTES", SLAB_BYTES)
    monkeypatch.setattr(slab_files, "MAX_SLAB_BYTES", SLAB_BYTES)
    disk = Disk(Conductor(), random.Random(1), tmp_path / "slabs")
    opened(disk, tmp_path / "slabs").write_pushes([pushed(1), pushed(2)])
    assert len(disk.slab_files()) == 2
    assert shas(disk) == {1, 2}
    return disk


def shas(disk: Disk) -> set[int]:
    """Groups whose payload on the disk equals the pushed one."""
    return {group for (group, _), sha in disk.payload_shas().items() if sha == pushed(group).record.sha}


@pytest.mark.parametrize("loss", ["deleted", "emptied", "cut"])
def test_a_lost_file_loses_what_lies_in_it_and_a_restart_finds_the_rest(disk: Disk, loss: Loss, tmp_path: Path) -> None:
    disk.lose_slab(disk.slab_files()[0], loss)
    assert disk.flipped == {(1, 1)}
    assert shas(disk) == {2}
    found = {key.group: record is not None for key, record, _ in opened(disk, tmp_path / "slabs").load()}
    assert found == {1: False, 2: True}


def test_what_is_stored_in_a_file_that_is_lost_already_is_lost(disk: Disk, tmp_path: Path) -> None:
    store = opened(disk, tmp_path / "slabs")
    before = disk.slab_files()
    store.write_pushes([pushed(3)])
    (path,) = {*disk.slab_files()} - {*before}
    disk.lose_slab(path, "emptied")
    store.delete([pushed(3).key])
    assert disk.flipped == {(3, 3)}
    store.write_pushes([pushed(4)])  # the shard still has the old file mapped, and writes into it once more
    assert disk.flipped == {(3, 3), (4, 4)}
    assert shas(disk) == {1, 2}


def test_a_flipped_byte_is_in_one_payload(disk: Disk) -> None:
    assert disk.flip(("payloads",)) is not None
    ((group, _),) = disk.flipped
    assert shas(disk) == {1, 2} - {group}


def test_slabs_that_are_put_back_are_as_they_were_copied(disk: Disk) -> None:
    copied = disk.copy_slabs()
    for path in disk.slab_files():
        disk.lose_slab(path, "deleted")
    assert shas(disk) == set()
    disk.put_back_slabs(copied)
    assert shas(disk) == {1, 2}
