"""A reader maps a bounded number of slabs over all shards and releases deleted ones; it requests frames where it cannot
read a slab."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from staleflow.clients import slab_reader as mapped
from staleflow.clients.slab_reader import MappedSlabs, Unmapped, Unreadable
from staleflow.clients.stage.worker import StageGroup, StageOutcome, StageWorker
from staleflow.clients.trainer.data.fetch import Fetcher
from staleflow.protocols.consistency.ids import GroupId, LeaseId, Lineage, Version, WorkerId
from staleflow.protocols.wire.messages import (
    GetGroups,
    GetStageWork,
    GroupFrames,
    Groups,
    MemberRef,
    Place,
    Pong,
    PutStageResults,
    Reply,
    Request,
    Result,
    Results,
    StageItem,
    StageWork,
)
from staleflow.protocols.wire.payload_digest import payload_digest
from staleflow.protocols.wire.tensors import pack
from tests.clients.trainer.making import payload
from tests.clients.weights.opened import open_files

SLABS = 3
"""Number of slabs per shard."""


class Shard:
    """Each slab has one group, for a trainer, and for a stage until the stage finishes it. A client on the same host
    gets places; any other client gets the packed bytes."""

    address = "memory"

    def __init__(self, folder: Path, shard: int) -> None:
        folder.mkdir()
        self._shard = shard
        self._blobs = [pack(payload(seed, [3, 4]).to_arrays()) for seed in range(SLABS)]
        for number, blob in enumerate(self._blobs):
            (folder / f"slab-{number}").write_bytes(blob)
        self.named = str(folder)
        """The folder that the shard reports for its slabs."""
        self.asked: list[tuple[bool, bool]] = []
        """(places were requested, the reader itself checks digests) of each request."""
        self.finished: list[GroupId] = []
        self._asks_for_more = False
        self.over = asyncio.Event()
        """Set once all groups are finished and the stage requests more."""

    def _of(self, number: int) -> tuple[GroupId, Place, str]:
        blob = self._blobs[number]
        place = Place(slab=f"slab-{number}", offset=0, nbytes=len(blob))
        return GroupId(self._shard * SLABS + number), place, payload_digest((blob,))

    def _look(self) -> None:
        if self._asks_for_more and len(self.finished) == SLABS:
            self.over.set()

    def members(self) -> list[MemberRef]:
        lease, lineage, version, shard = LeaseId(1), Lineage(0), Version(0), self._shard
        return [
            MemberRef(
                group=group,
                lease=lease,
                lineage=lineage,
                version=version,
                sha=sha,
                shard=shard,
                nbytes=place.nbytes,
                sequence_tokens=7,
            )
            for group, place, sha in map(self._of, range(SLABS))
        ]

    async def call(self, body: Request, *_: object, **__: object) -> tuple[Reply, list[memoryview]]:
        assert isinstance(body, GetGroups | GetStageWork)
        self.asked.append((bool(body.host), body.checks))
        every = [self._of(number) for number in range(SLABS)]
        frames = [] if body.host else [memoryview(blob) for blob in self._blobs]
        if isinstance(body, GetGroups):
            groups = [
                GroupFrames(group=group, row={}, frames=[], place=place if body.host else None, packed=not body.host)
                for group, place, _ in every
            ]
            return Groups(groups=groups, folder=self.named), frames
        if body.held or self.finished:
            self._asks_for_more = True
            self._look()
            await asyncio.Event().wait()
        items = [
            StageItem(
                group=group,
                lease=LeaseId(1),
                ticket=group,
                row={},
                frames=[],
                place=place if body.host else None,
                sha=sha,
            )
            for group, place, sha in every
        ]
        return StageWork(items=items, folder=self.named), frames

    async def ask(self, body: Request, *_: object, **__: object) -> Results | Pong:
        if not isinstance(body, PutStageResults):
            return Pong()
        self.finished += [result.group for result in body.results]
        self._look()
        return Results(results=[Result()] * len(body.results))


class Judge:
    """A stage that accepts every group."""

    together: ClassVar[bool] = False

    async def make(self, groups: Sequence[StageGroup]) -> Sequence[StageOutcome]:
        return [{"reward": np.ones(2, np.float32)}] * len(groups)

    async def accepted(self, groups: Sequence[StageGroup]) -> None:
        pass


def shards(folder: Path) -> list[Any]:
    return [Shard(folder / f"trajectories-{shard}", shard) for shard in range(4)]


async def test_a_trainer_keeps_a_bounded_number_of_maps_over_all_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapped, "MAX_MAPPED", 5)
    every = shards(tmp_path)
    fetcher = Fetcher(every)
    wanted = [member for shard in every for member in shard.members()]
    fetched = await fetcher.members(wanted)
    assert [item.group for item in fetched] == list(range(4 * SLABS))
    assert open_files(tmp_path) == 4 * SLABS  # the caller still refers to them
    del fetched
    await asyncio.sleep(0)  # let the tasks that fetched them release them, too
    assert open_files(tmp_path) == 5


async def judged(every: Sequence[Any]) -> asyncio.Task[None]:
    """Run a stage worker until it has finished every group of these shards and requests more."""
    stage = StageWorker(worker=WorkerId("reward-0"), name="reward", stage=Judge(), max_groups=SLABS)
    working = asyncio.create_task(stage.serve(every))
    async with asyncio.timeout(60):
        for shard in every:
            await shard.over.wait()
    return working


async def test_a_stage_worker_keeps_a_bounded_number_of_maps_over_all_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapped, "MAX_MAPPED", 5)
    working = await judged(shards(tmp_path))
    assert open_files(tmp_path) == 5
    working.cancel()


def changed(slab: Path) -> None:
    """Flip one bit of the slab."""
    data = bytearray(slab.read_bytes())
    data[-1] ^= 1
    slab.write_bytes(data)


async def test_a_trainer_that_cannot_open_slabs_asks_for_frames_from_then_on(tmp_path: Path) -> None:
    shard: Any = Shard(tmp_path / "trajectories-0", 0)
    shard.named = str(tmp_path / "of another container")
    fetcher = Fetcher([shard])
    for _ in range(2):
        assert len(await fetcher.members(shard.members())) == SLABS
    assert shard.asked == [(True, True), (False, True), (False, True)]


async def test_a_trainer_that_finds_damage_asks_for_what_the_shard_has_checked_and_goes_on_mapping(
    tmp_path: Path,
) -> None:
    shard: Any = Shard(tmp_path / "trajectories-0", 0)
    fetcher = Fetcher([shard])
    changed(tmp_path / "trajectories-0" / "slab-1")
    for _ in range(2):
        assert len(await fetcher.members(shard.members())) == SLABS
    assert shard.asked == [(True, True), (False, False)] * 2


async def test_a_stage_worker_that_cannot_open_slabs_asks_for_frames_from_then_on(tmp_path: Path) -> None:
    shard: Any = Shard(tmp_path / "trajectories-0", 0)
    shard.named = str(tmp_path / "of another container")
    (await judged([shard])).cancel()
    assert shard.asked[:3] == [(True, True), (False, True), (False, True)]


@pytest.mark.parametrize("harm", [changed, Path.unlink])
async def test_a_stage_worker_that_finds_damage_asks_for_what_the_shard_has_checked_and_goes_on_mapping(
    tmp_path: Path, harm: Callable[[Path], None]
) -> None:
    shard: Any = Shard(tmp_path / "trajectories-0", 0)
    harm(tmp_path / "trajectories-0" / "slab-1")
    (await judged([shard])).cancel()
    assert shard.asked[:3] == [(True, True), (False, False), (True, True)]


def test_what_cannot_be_opened_is_told_from_what_has_changed(tmp_path: Path) -> None:
    (tmp_path / "cut").write_bytes(b"cut")
    (tmp_path / "empty").touch()
    for slab in ("cut", "empty", "deleted"):
        with pytest.raises(Unreadable):
            MappedSlabs().open(str(tmp_path), Place(slab=slab, offset=0, nbytes=4))
    with pytest.raises(Unmapped):
        MappedSlabs().open(str(tmp_path / "of another container"), Place(slab="cut", offset=0, nbytes=3))


def test_a_slab_that_is_deleted_is_let_go_when_another_is_opened(tmp_path: Path) -> None:
    maps = MappedSlabs()
    for name in ("kept", "deleted", "another"):
        (tmp_path / name).write_bytes(name.encode())
    assert bytes(maps.open(str(tmp_path), Place(slab="kept", offset=0, nbytes=4))) == b"kept"
    view = maps.open(str(tmp_path), Place(slab="deleted", offset=0, nbytes=7))
    (tmp_path / "deleted").unlink()
    maps.open(str(tmp_path), Place(slab="another", offset=0, nbytes=7))
    assert (bytes(view), open_files(tmp_path)) == (b"deleted", 3)  # a view keeps its slab mapped
    view.release()
    del view
    assert open_files(tmp_path) == 2
