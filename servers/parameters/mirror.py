"""Copies of the registered versions in an object store: uploads beside the service, deletions after it.

- A version is uploaded once it is registered; publishes and pulls never wait for that. If the store is slower than the
  trainer, versions between the one being uploaded and the newest one are skipped.
- The mirror has only versions that the parameter server has and that survive. The index stops naming a version before
  its bytes are deleted.
- The parameter server does not verify the bytes before it uploads them: readers do, against the manifest.
"""

import asyncio
import logging
import re
from collections.abc import Coroutine, Mapping
from collections.abc import Set as AbstractSet
from contextlib import suppress
from typing import Any

import msgspec

from staleflow.protocols.consistency.ids import Lineage
from staleflow.servers.parameters.versions import Stored, VersionKey, Versions
from staleflow.store.disk_errors import Scarce
from staleflow.store.mirror import INDEX, MANIFEST, Index, MirroredVersion, parts
from staleflow.store.objects import Objects, StoreError, at_once

log = logging.getLogger(__name__)

RETRY_INTERVAL_S = 5.0
SLOW_UPLOAD_S = 300.0
"""Time of one upload after which the store counts as slow: readers no longer wait for versions that it lacks."""

_FOLDER = re.compile(r"\d+-\d+-[0-9a-f]{16}")


class Mirror:
    """The mirror of one run. Owned by the event loop of the parameter server, and affects it only by its load."""

    def __init__(self, objects: Objects, versions: Versions, run: str) -> None:
        self._objects = objects
        self._versions = versions
        self._run = run
        self._lineage = Lineage(0)
        self._wanted: dict[VersionKey, Stored] | None = None
        """The versions that the mirror should have; None until they are known."""
        self._registered: frozenset[VersionKey] = frozenset()
        """The versions that were registered when ``_wanted`` was chosen."""
        self._complete: dict[VersionKey, Stored] | None = None
        """The versions whose manifest is in the store; None until the store was listed."""
        self._folders: set[str] = set()
        """Folders in the store, complete or not."""
        self._unreadable: dict[VersionKey, Stored] = {}
        """Versions whose bytes could not be read here."""
        self._uploading: VersionKey | None = None
        self._closing = asyncio.Event()
        self._rolled_back = asyncio.Event()
        """Set when the lineage rises, until the index shows it."""
        self._index: Index | None = None
        """The index in the store; None if unknown."""
        self._changed = asyncio.Event()
        self._progress = asyncio.Event()
        """Set, and replaced by a new event, when ``has`` may have another result."""
        self._slow = False
        """The last upload took longer than ``SLOW_UPLOAD_S``."""
        self.trouble = ""
        """Why readers should not wait for the store; "" if it works."""

    def update(
        self, lineage: Lineage, wanted: Mapping[VersionKey, Stored], registered: AbstractSet[VersionKey]
    ) -> None:
        """Set the newest lineage, the versions that the mirror should have, and the registered versions among which
        they were chosen."""
        before = self._wanted
        if self._registered != registered:
            self._registered = frozenset(registered)
            self._notify()
        same = before is not None and before.keys() == wanted.keys() and lineage == self._lineage
        if before is None or not (same and all(before[key] is stored for key, stored in wanted.items())):
            if lineage != self._lineage:
                self._rolled_back.set()
            self._lineage, self._wanted = lineage, dict(wanted)
            self._changed.set()
            self._notify()

    async def has(self, key: VersionKey) -> bool:
        """Wait for the upload of a registered version. Return False if it will not come, or not soon."""
        while self._complete is None or key not in self._complete:
            if self.trouble or self._closing.is_set() or not self._is_expected(key):
                return False
            await self._progress.wait()
        return True

    def close(self) -> None:
        """Let ``work`` return after the work in progress."""
        self._closing.set()
        self._changed.set()
        self._notify()

    async def work(self) -> None:
        """Keep the store in step with the wanted versions until closed or cancelled."""
        while self._changed.is_set() or not self._closing.is_set():
            await self._changed.wait()
            self._changed.clear()
            try:
                await self._sync()
            except StoreError as error:
                self._fail(str(error))
                self._complete = None  # list the store again: a request without a reply may have been executed
                with suppress(TimeoutError):
                    async with asyncio.timeout(RETRY_INTERVAL_S):
                        await self._closing.wait()
                        return
                self._changed.set()

    def _is_expected(self, key: VersionKey) -> bool:
        """Return True if the version is being uploaded, is the next one, or was registered a moment ago."""
        if key == self._uploading or self._wanted is None or key not in self._registered:
            return True
        return key == max(self._wanted, default=None) and key not in self._unreadable

    async def _sync(self) -> None:
        """Bring index and objects into line with the wanted versions; upload the newest one if it is missing."""
        if (wanted := self._wanted) is None:
            return
        self._rolled_back.clear()
        self._unreadable = {key: stored for key, stored in self._unreadable.items() if wanted.get(key) is stored}
        if self._complete is None:
            await self._list(wanted)
        complete = self._complete or {}
        gone = {key for key, stored in complete.items() if wanted.get(key) is not stored}
        for key in gone:
            del complete[key]
        await self._write_index()
        keep = {_mirrored(stored).folder for stored in complete.values()}
        newest = max(wanted, default=None)
        missing = newest is not None and newest not in complete and newest not in self._unreadable
        if newest is not None and missing and newest not in gone:  # else it was damaged, perhaps in the mirror, too
            keep.add(_mirrored(wanted[newest]).folder)
        for folder in sorted(self._folders - keep):
            await self._delete(folder)
        if newest is not None and missing:
            await self._until_rollback(self._upload(newest, wanted[newest]))
            await self._write_index()
            self._changed.set()
        elif not self._slow:
            self._recover()

    async def _list(self, wanted: Mapping[VersionKey, Stored]) -> None:
        """List what an earlier process or attempt has left in the store."""
        names = await self._objects.sizes()
        self._folders = {folder for name in names if _FOLDER.fullmatch(folder := name.partition("/")[0])}
        self._complete = {
            key: stored for key, stored in wanted.items() if f"{_mirrored(stored).folder}/{MANIFEST}" in names
        }
        self._index = None
        self._notify()

    async def _write_index(self) -> None:
        """Name the complete versions that are still wanted."""
        complete, wanted = self._complete or {}, self._wanted or {}
        versions = tuple(_mirrored(stored) for key, stored in sorted(complete.items()) if wanted.get(key) is stored)
        index = Index(run=self._run, lineage=self._lineage, versions=versions)
        if index != self._index:
            self._index = None
            await self._objects.put(INDEX, msgspec.json.encode(index))
            self._index = index

    async def _delete(self, folder: str) -> None:
        """Delete a version, its manifest first: parts without one never count as a version."""
        await self._objects.delete_folder(folder, first=MANIFEST)
        self._folders.discard(folder)

    async def _until_rollback(self, work: Coroutine[Any, Any, None]) -> None:
        """Run ``work``, and cancel it at a rollback: the index must not name abandoned versions until it ends."""
        working, rollback = asyncio.ensure_future(work), asyncio.ensure_future(self._rolled_back.wait())
        try:
            await asyncio.wait((working, rollback), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (working, rollback):
                task.cancel()
            await asyncio.wait((working, rollback))
        if not working.cancelled():
            working.result()

    async def _upload(self, key: VersionKey, stored: Stored) -> None:
        mirrored, loop = _mirrored(stored), asyncio.get_running_loop()
        began_s, self._uploading = loop.time(), key
        slow = loop.call_later(SLOW_UPLOAD_S, self._on_slow, key)
        self._folders.add(mirrored.folder)
        try:
            existing = await self._objects.sizes(f"{mirrored.folder}/")
            missing = [
                part for part in parts(mirrored.nbytes) if existing.get(f"{mirrored.folder}/{part[0]}") != part[2]
            ]
            await at_once(self._send(stored, f"{mirrored.folder}/{name}", *place) for name, *place in missing)
            manifest = msgspec.json.encode(stored.about.manifest)
            await self._objects.put(f"{mirrored.folder}/{MANIFEST}", manifest)
            if self._complete is not None:
                self._complete[key] = stored
        except (OSError, Scarce) as error:  # the version was deleted in the meantime, or its disk fails
            log.warning("%s is not uploaded to the mirror: %s", key, error)
            self._unreadable[key] = stored
        else:
            took_s = loop.time() - began_s
            log.info("%s is in the mirror, %d bytes in %.1f s", key, mirrored.nbytes, took_s)
            self._slow = self._slow and took_s >= SLOW_UPLOAD_S
        finally:
            slow.cancel()
            self._uploading = None
            self._notify()

    async def _send(self, stored: Stored, name: str, offset: int, nbytes: int) -> None:
        data = await asyncio.to_thread(self._versions.read, stored, offset, nbytes)
        if len(data) != nbytes:
            raise OSError(f"{stored.path.name} ends before byte {offset + nbytes}")
        await self._objects.put(name, data)

    def _on_slow(self, key: VersionKey) -> None:
        self._slow = True
        self._fail(f"the store is slow: the upload of {key} takes over {SLOW_UPLOAD_S:.0f} s")

    def _fail(self, trouble: str) -> None:
        """Stop readers from waiting. Log the first failure only."""
        if not self.trouble:
            log.error("the mirror is behind: %s; engines load over the network", trouble)
        self.trouble = trouble
        self._notify()

    def _recover(self) -> None:
        if self.trouble:
            log.info("the mirror works again")
            self.trouble = ""
            self._notify()

    def _notify(self) -> None:
        progress, self._progress = self._progress, asyncio.Event()
        progress.set()


def _mirrored(stored: Stored) -> MirroredVersion:
    about = stored.about
    manifest = about.manifest
    return MirroredVersion(lineage=about.lineage, version=about.version, sha=manifest.sha, nbytes=manifest.nbytes)
