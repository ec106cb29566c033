"""Who deletes versions at the same time, and what comes while they ask what is in use."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from staleflow.protocols.consistency.ids import Lineage, TrainerTerm, Version
from staleflow.protocols.wire.messages import KeepVersions, Manifest, Registered, VersionsInUse
from staleflow.runtime.errors import Refused
from staleflow.servers.parameters.catalog import Catalog
from staleflow.servers.parameters.versions import About, VersionKey, Versions

MIB = 1 << 20


class Scheduler:
    """Registers at once; what is in use it says when the test does."""

    def __init__(self) -> None:
        self.asked: list[asyncio.Future[KeepVersions]] = []

    async def ask(self, body: object, *_: object, **__: object) -> object:
        if not isinstance(body, VersionsInUse):
            return Registered(lineage=Lineage(0), version=Version(0))
        self.asked.append(asyncio.get_running_loop().create_future())
        return await self.asked[-1]

    def answer(self, number: int, *used: int) -> None:
        self.asked[number].set_result(KeepVersions(versions=[(Lineage(0), Version(version)) for version in used]))


class Store:
    """A catalog of versions of one MiB each, with room for four."""

    def __init__(self, folder: Path) -> None:
        self.scheduler = Scheduler()
        scheduler: Any = self.scheduler
        self._versions = Versions(folder, durability="process")
        self.catalog = Catalog(self._versions, scheduler, keep_versions=1, budget_bytes=4 * MIB)

    async def add(self, *versions: int) -> None:
        for version in versions:
            key = VersionKey(Lineage(0), Version(version))
            manifest = Manifest(nbytes=MIB, tensors=[], sha=str(version))
            about = About(
                lineage=key.lineage, version=key.version, trainer_term=TrainerTerm(1), batch=None, manifest=manifest
            )
            await self.catalog.keep(self._versions.stage(key, MIB), about, in_place=True)
            await self.catalog.register(about)

    def collect(self) -> "asyncio.Task[None]":
        return asyncio.ensure_future(self.catalog.collect())

    def make_room(self, mib: int) -> "asyncio.Task[None]":
        return asyncio.ensure_future(self.catalog.make_room(VersionKey(Lineage(0), Version(9)), mib * MIB, 0))

    def versions(self) -> list[int]:
        return [int(row["version"]) for row in self.catalog.status()]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
async def test_two_who_want_the_same_version_deleted_delete_it_once(tmp_path: Path, order: tuple[int, int]) -> None:
    store = Store(tmp_path)
    await store.add(0, 1, 2)
    both = [store.collect(), store.make_room(3)]
    await asyncio.sleep(0)
    for number in order:
        store.scheduler.answer(number, 2)
        await both[number]
    assert store.versions() == [2]


async def test_what_is_registered_while_they_ask_is_not_deleted_by_an_answer_from_before(tmp_path: Path) -> None:
    store = Store(tmp_path)
    await store.add(0, 1)
    collecting, making = store.collect(), store.make_room(3)
    await asyncio.sleep(0)
    await store.add(2, 3)
    for number in range(2):
        store.scheduler.answer(number, 1)
    await collecting
    with pytest.raises(Refused, match="3 of 4 MiB"):
        await making
    assert store.versions() == [1, 2, 3]
