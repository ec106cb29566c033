"""Slabs that a reader keeps mapped: a bounded number over all shards, and none that is deleted."""

import asyncio
import os
from collections.abc import Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from staleflow.clients import mapped
from staleflow.clients.mapped import MappedSlabs
from staleflow.clients.stage.worker import Made, StageGroup, StageWorker
from staleflow.clients.trainer.fetching import Fetcher
from staleflow.protocols.consistency.ids import GroupId, LeaseId, Lineage, Version, WorkerId
from staleflow.protocols.wire.messages import (
    FetchGroups,
    FinishStage,
    GroupFrames,
    Groups,
    MemberRef,
    Place,
    Reply,
    Request,
    Result,
    Results,
    StageItem,
    StageWork,
)
from staleflow.protocols.wire.tensors import pack
from tests.clients.trainer.making import payload

SLABS = 3
"""Of each shard."""


class Shard:
    """Has one group in each of its slabs, for a trainer, and once for a stage."""

    address = "memory"

    def __init__(self, folder: Path, shard: int) -> None:
        folder.mkdir()
        self._folder, self._shard = folder, shard
        self._blobs = [pack(payload(seed, [3, 4]).to_arrays()) for seed in range(SLABS)]
        for number, blob in enumerate(self._blobs):
            (folder / f"slab-{number}").write_bytes(blob)
        self._taken = False
        self.finished: list[GroupId] = []

    def _of(self, number: int) -> tuple[GroupId, Place, str]:
        blob = self._blobs[number]
        place = Place(slab=f"slab-{number}", offset=0, nbytes=len(blob))
        return GroupId(self._shard * SLABS + number), place, sha256(blob).hexdigest()

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
        every, folder = [self._of(number) for number in range(SLABS)], str(self._folder)
        if isinstance(body, FetchGroups):
            groups = [GroupFrames(group=group, row={}, frames=[], place=place) for group, place, _ in every]
            return Groups(groups=groups, folder=folder), []
        if self._taken:
            await asyncio.Event().wait()
        self._taken = True
        items = [
            StageItem(group=group, lease=LeaseId(1), ticket=group, row={}, frames=[], place=place, sha=sha)
            for group, place, sha in every
        ]
        return StageWork(items=items, folder=folder), []

    async def ask(self, body: FinishStage, *_: object, **__: object) -> Results:
        self.finished += [result.group for result in body.results]
        return Results(results=[Result()] * len(body.results))


class Judge:
    """Likes everything."""

    together: ClassVar[bool] = False

    async def make(self, groups: Sequence[StageGroup]) -> Sequence[Made]:
        return [{"reward": np.ones(2, np.float32)}] * len(groups)

    async def accepted(self, groups: Sequence[StageGroup]) -> None:
        pass


def open_files(folder: Path) -> int:
    """Descriptors that this process has of files in a folder, deleted ones among them."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of this look
            found += os.readlink(f"/proc/self/fd/{name}").startswith(f"{folder}/")
    return found


def shards(folder: Path) -> list[Any]:
    return [Shard(folder / f"trajectories-{shard}", shard) for shard in range(4)]


async def test_a_trainer_keeps_a_bounded_number_of_maps_over_all_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapped, "MOST", 5)
    every = shards(tmp_path)
    fetcher = Fetcher(every)
    wanted = [member for shard in every for member in shard.members()]
    fetched = await fetcher.members(wanted)
    assert [item.group for item in fetched] == list(range(4 * SLABS))
    assert open_files(tmp_path) == 4 * SLABS  # they are looked at
    del fetched
    await asyncio.sleep(0)  # the tasks that fetched them let go, too
    assert open_files(tmp_path) == 5


async def test_a_stage_worker_keeps_a_bounded_number_of_maps_over_all_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapped, "MOST", 5)
    every = shards(tmp_path)
    stage = StageWorker(worker=WorkerId("reward-0"), name="reward", stage=Judge(), max_groups=SLABS)
    working = asyncio.create_task(stage.serve(every))
    async with asyncio.timeout(20):
        while sum(len(shard.finished) for shard in every) < 4 * SLABS:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert open_files(tmp_path) == 5
    working.cancel()


def test_a_slab_that_is_deleted_is_let_go_when_another_is_opened(tmp_path: Path) -> None:
    maps = MappedSlabs()
    for name in ("kept", "deleted", "another"):
        (tmp_path / name).write_bytes(name.encode())
    assert bytes(maps.open(str(tmp_path), Place(slab="kept", offset=0, nbytes=4))) == b"kept"
    view = maps.open(str(tmp_path), Place(slab="deleted", offset=0, nbytes=7))
    (tmp_path / "deleted").unlink()
    maps.open(str(tmp_path), Place(slab="another", offset=0, nbytes=7))
    assert (bytes(view), open_files(tmp_path)) == (b"deleted", 3)  # whoever has a view keeps it
    view.release()
    del view
    assert open_files(tmp_path) == 2
