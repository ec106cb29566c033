"""Concurrent deletions of versions stay correct while requests for the versions in use are pending."""

import asyncio
import errno
import os
from pathlib import Path
from typing import Any

import pytest

from staleflow.net.errors import Refused
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.consistency.ids import Lineage, TrainerTerm, Version
from staleflow.protocols.wire.manifest import lay_out
from staleflow.protocols.wire.messages import GetRetainedVersions, RegisterVersionReply, RetainedVersions
from staleflow.servers.parameters import catalog
from staleflow.servers.parameters.catalog import Catalog
from staleflow.servers.parameters.versions import About, Staged, VersionKey, Versions
from staleflow.store.disk_errors import Scarce
from tests.servers.parameters.crowded import holds

MIB = 1 << 20
KEY = VersionKey(Lineage(0), Version(0))


class Scheduler:
    """Scheduler that registers at once and reports the versions in use when the test lets it."""

    def __init__(self) -> None:
        self.asked: list[asyncio.Future[RetainedVersions]] = []
        self.fences = False
        """If True, registers nothing more."""

    async def ask(self, body: object, *_: object, **__: object) -> object:
        if not isinstance(body, GetRetainedVersions):
            if self.fences:
                raise Refused(Code.FENCED, "trainer term 1 is over, 2 is in charge")
            return RegisterVersionReply(lineage=Lineage(0), version=Version(0))
        self.asked.append(asyncio.get_running_loop().create_future())
        return await self.asked[-1]

    def answer(self, number: int, *used: int) -> None:
        self.asked[number].set_result(RetainedVersions(versions=[(Lineage(0), Version(version)) for version in used]))


def about_of(version: int) -> About:
    manifest = lay_out([("w", "uint8", (MIB,), f"{version:032x}")])
    return About(
        lineage=Lineage(0), version=Version(version), trainer_term=TrainerTerm(1), batch=None, manifest=manifest
    )


class Store:
    """A catalog of versions of one MiB each, with room for four."""

    def __init__(self, folder: Path, *, keep_versions: int = 1, budget: int = 4 * MIB) -> None:
        self.scheduler = Scheduler()
        scheduler: Any = self.scheduler
        self._versions = Versions(folder, durability="process")
        self.catalog = Catalog(self._versions, scheduler, keep_versions=keep_versions, budget_bytes=budget)

    async def begun(self) -> "Store":
        """Return a new store with an empty folder."""
        recovering = self.recover()
        await asyncio.sleep(0)
        self.scheduler.answer(0)
        await recovering
        self.scheduler.asked.clear()
        return self

    async def add(self, *versions: int) -> None:
        for version in versions:
            about = about_of(version)
            await self.catalog.keep(self._versions.stage(about.key, MIB), about, in_place=True)
            await self.catalog.register(about)

    def recover(self) -> "asyncio.Task[None]":
        return asyncio.ensure_future(self.catalog.recover())

    def collect(self) -> "asyncio.Task[bool]":
        return asyncio.ensure_future(self.catalog.collect())

    def stage(self, mib: int) -> "asyncio.Task[Staged]":
        return asyncio.ensure_future(self.catalog.stage(VersionKey(Lineage(0), Version(9)), mib * MIB, 0))

    def versions(self) -> list[int]:
        return [row.version for row in self.catalog.status()]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
async def test_two_who_want_the_same_version_deleted_delete_it_once(tmp_path: Path, order: tuple[int, int]) -> None:
    store = await Store(tmp_path).begun()
    await store.add(0, 1, 2)
    both = [store.collect(), store.stage(2)]
    await asyncio.sleep(0)
    for number in order:
        store.scheduler.answer(number, 2)
        await both[number]
    assert store.versions() == [2]


async def test_what_is_registered_while_they_ask_is_not_deleted_by_an_answer_from_before(tmp_path: Path) -> None:
    store = await Store(tmp_path).begun()
    await store.add(0, 1)
    collecting, staging = store.collect(), store.stage(3)
    await asyncio.sleep(0)
    await store.add(2, 3)
    for number in range(2):
        store.scheduler.answer(number, 1)
    await collecting
    while len(store.scheduler.asked) < 3:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    store.scheduler.answer(2, 1, 2)
    with pytest.raises(Refused, match="3 of 4 MiB"):
        await staging
    assert store.versions() == [1, 2, 3]


async def test_on_a_full_disk_the_oldest_go_that_are_kept_by_count_or_as_a_base(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await Store(tmp_path, keep_versions=9, budget=0).begun()
    await store.add(0, 1, 2, 3, 4)
    holds(monkeypatch, tmp_path, 5 * MIB)
    pins = store.catalog.pins
    for version in (1, 2):
        pins.add("reader.1", VersionKey(Lineage(0), Version(version)))
    pins.keep_as_base("reader.1", VersionKey(Lineage(0), Version(1)))
    for mib, number in ((2, 0), (1, 2)):
        staging = store.stage(mib)
        while not staging.done():
            if len(store.scheduler.asked) > number:
                store.scheduler.answer(number, 0)
                number += 1
            await asyncio.sleep(0.001)
        if mib == 2:
            assert (await staging).path.stat().st_size == 2 * MIB
        else:
            with pytest.raises(Refused, match="No space left on device") as no:
                await staging
            assert no.value.code is Code.BUSY
        assert store.versions() == [0, 2, 4]


async def test_a_version_that_is_deleted_before_it_is_looked_at_is_not_corrupt(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = await Store(tmp_path).begun()
    await store.add(0, 1)
    key = VersionKey(Lineage(0), Version(0))
    stored = store.catalog.find(key)
    collecting = store.collect()
    await asyncio.sleep(0)
    store.scheduler.answer(0, 1)
    await collecting
    with pytest.raises(Refused, match="is not here"):
        await store.catalog.verified("reader.1", key, stored, doubted=False)
    assert "corrupt" not in caplog.text


def test_what_is_published_again_while_its_old_file_is_removed_stays(tmp_path: Path) -> None:
    versions, about = Versions(tmp_path, durability="process"), about_of(0)

    def publish() -> None:
        versions.stored[about.key] = versions.keep(versions.stage(about.key, MIB), about, in_place=True)

    publish()
    aside = versions.put_aside(about.key)
    publish()
    versions.remove(aside)
    assert {path.name for path in tmp_path.iterdir()} == {"0-0.bin", "0-0.json"}


@pytest.mark.parametrize("reuse", [False, True])
def test_a_version_that_was_put_aside_is_not_there_after_a_kill(tmp_path: Path, reuse: bool) -> None:
    versions, about = Versions(tmp_path, durability="process"), about_of(0)
    versions.stored[about.key] = versions.keep(versions.stage(about.key, MIB), about, in_place=True)
    versions.put_aside(about.key, reuse=reuse)
    assert Versions(tmp_path, durability="process").stored == {}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("doubted", [False, True])
async def test_a_version_that_cannot_be_opened_at_present_is_not_corrupt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, doubted: bool
) -> None:
    store = await Store(tmp_path).begun()
    await store.add(0)
    stored = store.catalog.find(KEY)
    stored.verified = None

    def none_left(*_: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patched:
        patched.setattr("staleflow.servers.parameters.versions.hold", none_left)
        store.catalog.pins.add("reader", KEY)
        with pytest.raises(Refused, match="Too many open files") as no:
            await store.catalog.verified("reader", KEY, stored, doubted=doubted)
        assert no.value.code is Code.BUSY
        assert not store.catalog.pins.of(KEY)
        with pytest.raises(Scarce):
            Versions(tmp_path, durability="process").read(stored, 0, 4)
        patched.setattr(os, "open", none_left)
        with pytest.raises(Scarce):
            Versions(tmp_path, durability="process").write(
                Staged(key=KEY, path=stored.path, recycled=False), 0, b"1234"
            )
    assert store.catalog.find(KEY) is stored


def test_a_version_goes_also_where_a_full_disk_has_no_room_for_another_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = Versions(tmp_path, durability="process")
    about = about_of(0)
    versions.stored[KEY] = versions.keep(versions.stage(KEY, MIB), about, in_place=True)

    def full(*_: object) -> Path:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", full)
        versions.delete(KEY)
    assert list(tmp_path.iterdir()) == []
    assert versions.stored == {}


async def test_what_a_fenced_trainer_says_once_more_after_a_restart_deletes_no_version_of_the_run(
    tmp_path: Path,
) -> None:
    await (await Store(tmp_path).begun()).add(0, 1)
    again = Store(tmp_path)
    again.scheduler.fences = True
    echo = asyncio.ensure_future(again.catalog.register(about_of(1)))
    recovering = again.recover()
    await asyncio.sleep(0)
    again.scheduler.answer(0, 0, 1)
    await recovering
    assert await echo == RegisterVersionReply(lineage=Lineage(0), version=Version(1))
    assert again.versions() == [0, 1]


async def test_versions_stay_while_nobody_says_which_are_the_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog, "RETRY_INTERVAL_S", 0.001)
    await (await Store(tmp_path).begun()).add(0, 1)
    again = Store(tmp_path)
    again.scheduler.fences = True
    recovering = again.recover()
    await asyncio.sleep(0)
    again.scheduler.asked[0].set_exception(Refused(Code.STALE, "the run is over"))
    while len(again.scheduler.asked) < 2:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    assert again.versions() == [0, 1]
    again.scheduler.answer(1, 1)
    await recovering
    assert again.versions() == [1]
