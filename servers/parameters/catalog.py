"""Catalog of the versions: registered, corrupt, pinned, in use.

- A version counts once the scheduler has registered it. A version that the scheduler rejects is deleted.
- Deleted are versions that are neither pinned, nor in use according to the scheduler, nor among the newest
  ``keep_versions``. If a new version would exceed the budget or the disk, the oldest ones are deleted despite
  ``keep_versions``, bases of deltas included. The newest one always stays.
"""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress

import msgspec

from staleflow.net.client import Client
from staleflow.net.errors import Refused
from staleflow.process.rate_limited_log import RateLimitedLog
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.consistency.ids import Lineage, TrainerTerm
from staleflow.protocols.wire.messages import (
    GetRetainedVersions,
    GetStatus,
    RegisterVersion,
    RegisterVersionReply,
    RetainedVersions,
    SchedulerStatus,
    WrittenSpan,
)
from staleflow.protocols.wire.messages.status import PublishedVersion
from staleflow.servers.parameters.pins import Pins
from staleflow.servers.parameters.spans import digested
from staleflow.servers.parameters.turns import FullChecks
from staleflow.servers.parameters.versions import (
    About,
    CorruptVersion,
    NoRoom,
    Staged,
    Stored,
    Unwritable,
    VersionKey,
    Versions,
)
from staleflow.store.disk_errors import Scarce

log = logging.getLogger(__name__)

RETRY_INTERVAL_S = 1.0
"""Retry interval after a refusal that may be temporary: the run is over, or a key is currently not allowed."""


class Catalog:
    """All versions of the folder. Owned by one event loop; slow file work runs in threads."""

    def __init__(self, versions: Versions, scheduler: Client, *, keep_versions: int, budget_bytes: int = 0) -> None:
        self.pins = Pins()
        self._versions = versions
        self._scheduler = scheduler
        self._keep_versions = keep_versions
        self._budget_bytes = budget_bytes
        self._registered: set[VersionKey] = set()
        self.lineage = Lineage(0)
        """Newest lineage of the run, as of the last answer of the scheduler."""
        self.judged: frozenset[VersionKey] = frozenset()
        """The versions that were registered when this server asked which survive."""
        self._surviving: set[VersionKey] = set()
        """Registered versions that no rollback has abandoned, as of the same answer."""
        self._recovered = asyncio.Event()
        """Set once it is known which versions were registered before this process started."""
        self._corrupt: dict[VersionKey, str] = {}
        self._verifying = asyncio.Lock()
        self._full_checks = FullChecks(versions)
        self._log_limit = RateLimitedLog()
        self.publishing = asyncio.Lock()
        """Held while a version is added or registered."""
        self.grown = asyncio.Event()
        """Set when a version was added, so an older one may be deleted."""

    # For pullers -----------------------------------------------------------------------------------------------------

    def find(self, key: VersionKey) -> Stored:
        """Return a version that may be served. Raise ``Refused`` if it does not exist, is corrupt, or is not
        registered yet."""
        if (stored := self._versions.stored.get(key)) is None:
            raise Refused(Code.BAD_VERSION, f"{key} is not here")
        if key in self._corrupt:
            raise Refused(Code.BAD_VERSION, self._corrupt[key])
        if key not in self._registered:
            raise Refused(Code.BUSY, f"{key} is waiting for its registration")
        return stored

    async def verified(self, worker: str, key: VersionKey, stored: Stored, *, doubted: bool) -> None:
        """Verify the bytes of a pinned version: all of them if they are ``doubted``, else only if the file has changed.

        If they are corrupt, or currently unreadable, remove the pin and raise ``Refused``.
        """
        try:
            if doubted:
                await self._full_checks.check(stored)
                return
            async with self._verifying:  # serialized: a second reader finds the file verified
                await asyncio.to_thread(self._versions.verify, stored)
        except CorruptVersion as error:
            self.pins.remove(worker, key)
            raise self.quarantined(key, stored, error) from error
        except Scarce as error:
            self.pins.remove(worker, key)
            raise Refused(Code.BUSY, str(error)) from error

    def quarantined(self, key: VersionKey, stored: Stored, error: Exception) -> Refused:
        """Stop serving a version whose bytes are wrong or unreadable; return the refusal to send."""
        if self._versions.stored.get(key) is not stored:  # deleted or published again in the meantime
            return Refused(Code.BAD_VERSION, f"{key} is not here")
        log.error("%s is corrupt and no longer served: %s", key, error)
        self._corrupt[key] = f"{key} is corrupt: {error}"
        return Refused(Code.BAD_VERSION, self._corrupt[key])

    # For the publisher -----------------------------------------------------------------------------------------------

    def lacks(self, about: About) -> bool:
        """Return True if the version must be stored, False if these bytes are stored already.

        Raise ``Refused``: ``CONFLICT`` if it is published with other bytes, ``BUSY`` while its registration is
        undecided.
        """
        key, existing = about.key, self._versions.stored.get(about.key)
        if existing is None:
            return True
        if existing.about.manifest.sha == about.manifest.sha:
            return key in self._corrupt
        if key not in self._registered:
            raise Refused(Code.BUSY, f"{key} is waiting for its registration")
        raise Refused(Code.CONFLICT, f"{key} is already published with other bytes: {existing.about.manifest.sha}")

    async def stage(self, key: VersionKey, nbytes: int, upload_bytes: int) -> Staged:
        """Create a file for a version of ``nbytes``.

        ``upload_bytes``: bytes of the other uploads in progress. Versions that are kept only by count or as a base are
        deleted until the new one fits into the budget and onto the disk. Raise ``Refused``: ``BUSY`` if it does not fit
        even then, ``DENIED`` if it exceeds the whole budget.
        """
        budget = self._budget_bytes
        if nbytes > budget > 0:
            raise Refused(Code.DENIED, f"{key} has {nbytes} bytes; parameters.budget_mb allows {budget >> 20} MiB")
        while True:
            used_bytes = self._nbytes + upload_bytes
            if budget and used_bytes + nbytes > budget:
                if not await self._make_room():
                    full = f"{used_bytes >> 20} of {budget >> 20} MiB of parameters.budget_mb are in use"
                    raise Refused(Code.BUSY, f"{key} has {nbytes} bytes; {full}")
                continue
            try:
                return await asyncio.to_thread(self._versions.stage, key, nbytes)
            except NoRoom as error:
                if isinstance(error, Unwritable) or not await self._make_room():
                    self._log_no_room(error)
                    raise Refused(Code.BUSY, str(error)) from error

    def _log_no_room(self, error: Exception) -> None:
        """Log a lack of room, rate-limited: the publisher retries five times a second."""
        if (more := self._log_limit.due()) is not None:
            log.error("no room: %s%s", error, more)

    async def _make_room(self) -> bool:
        """Delete the oldest version that is kept only by count or as a base; return False if there is none.

        Raise ``Refused`` if the scheduler does not list the versions in use: the run is over.
        """
        before = sorted(self._registered)[:-1]
        used = await self._in_use()
        for old in before:
            if old not in self._registered:  # a concurrent call made room
                return True
            if old not in used and not self.pins.in_use(old):
                await self._delete(old)
                return True
        return False

    @property
    def _nbytes(self) -> int:
        return sum(stored.about.manifest.nbytes for stored in self._versions.stored.values())

    async def check_begun(self, term: TrainerTerm) -> None:
        """Raise ``Refused`` with ``DENIED`` if the scheduler has issued no such trainer term.

        A peer that could invent a term would fence every future trainer.
        """
        status = await self._scheduler.ask(GetStatus(), SchedulerStatus, timeout_s=None)
        if term > status.trainer_term:
            raise Refused(Code.DENIED, f"unknown trainer term: {term}; the newest one is {status.trainer_term}")

    async def digested(self, staged: Staged, about: About, tiles: Sequence[Sequence[WrittenSpan]]) -> About:
        """Return the description of a version that ranks wrote in spans, with the digests of its tensors.

        Raise ``Refused`` with ``STALE`` if the bytes of a span are not those of its digest; all must be written again.
        """
        try:
            manifest = await asyncio.to_thread(digested, staged.path, about.manifest, tiles)
        except CorruptVersion as error:
            log.error("publish rejected: %s", error)
            await asyncio.to_thread(self._versions.discard, staged)
            raise Refused(Code.STALE, f"{error}; begin again") from error
        except Scarce as error:
            raise Refused(Code.BUSY, str(error)) from error
        return msgspec.structs.replace(about, manifest=manifest)

    async def keep(self, staged: Staged, about: About, *, in_place: bool) -> None:
        """Store a version durably. Raise ``Refused`` with ``STALE`` if its bytes do not match the manifest; they
        must be written again."""
        key = about.key
        try:
            stored = await asyncio.to_thread(self._versions.keep, staged, about, in_place=in_place)
        except CorruptVersion as error:
            log.error("publish rejected: %s", error)
            raise Refused(Code.STALE, f"{error}; begin again") from error
        except (NoRoom, Scarce) as error:
            self._log_no_room(error)
            raise Refused(Code.BUSY, str(error)) from error
        self._versions.stored[key] = stored
        self._corrupt.pop(key, None)

    async def register(self, about: About) -> RegisterVersionReply:
        """Register a durable version with the scheduler; delete the version if the scheduler rejects it.

        A version that is registered already is not submitted again: the rejection of a trainer that was fenced in the
        meantime would delete a version that the run uses.
        """
        # Until recovery is done, it is unknown whether an earlier process has registered the version.
        await self._recovered.wait()
        key, manifest = about.key, about.manifest
        if key in self._registered:
            return RegisterVersionReply(lineage=about.lineage, version=about.version)
        request = RegisterVersion(
            trainer_term=about.trainer_term,
            lineage=about.lineage,
            version=about.version,
            batch=about.batch,
            sha=manifest.sha,
            nbytes=manifest.nbytes,
        )
        try:
            registered = await self._scheduler.ask(request, RegisterVersionReply, timeout_s=None)
        except Refused as refusal:
            log.warning("%s rejected by the scheduler: %s", key, refusal)
            await asyncio.to_thread(self._versions.remove, self._versions.put_aside(key))
            raise
        self._registered.add(key)
        await asyncio.to_thread(self._versions.reach, self._versions.reached.run, key)
        self.grown.set()
        log.info("%s published, %d bytes, sha %s", key, manifest.nbytes, manifest.sha[:12])
        return registered

    # Housekeeping ----------------------------------------------------------------------------------------------------

    async def recover(self) -> None:
        """Find out which versions of the folder are registered; submit the others. None is deleted before the
        scheduler replies."""
        while (used := await self._used()) is None:  # noqa: ASYNC110
            await asyncio.sleep(RETRY_INTERVAL_S)
        self._registered |= used & self._versions.stored.keys()
        self._recovered.set()
        for key in sorted(self._versions.stored.keys() - self._registered):
            async with self.publishing:
                if (stored := self._versions.stored.get(key)) is not None:
                    with suppress(Refused):
                        await self.register(stored.about)

    async def collect(self) -> bool:
        """Delete versions that are neither used, nor pinned, nor among the newest. Return False if the run is over."""
        before = sorted(self._registered)
        if (used := await self._used()) is None:
            return False
        keep = used | set(before[-self._keep_versions :])
        for key in before:
            if key in self._registered and key not in keep and not self.pins.of(key):
                await self._delete(key)
        return True

    async def _delete(self, key: VersionKey) -> None:
        """Delete a version: it is invisible immediately, its room is free on return."""
        self._registered.discard(key)
        corrupt = self._corrupt.pop(key, None)
        aside = self._versions.put_aside(key, reuse=corrupt is None)
        log.info("%s deleted", key)
        await asyncio.to_thread(self._versions.remove, aside)

    async def _used(self) -> set[VersionKey] | None:
        """Return the versions in use; None if the run is over."""
        try:
            return await self._in_use()
        except Refused:
            return None

    async def _in_use(self) -> set[VersionKey]:
        """Return the versions that the scheduler lists as in use. Raise ``Refused`` if the run is over."""
        request = GetRetainedVersions(stored=sorted(self._registered))
        answer = await self._scheduler.ask(request, RetainedVersions, timeout_s=None)
        self.lineage, self._surviving = answer.lineage, {VersionKey(*key) for key in answer.surviving}
        self.judged = frozenset(VersionKey(*key) for key in request.stored)
        return {VersionKey(*key) for key in answer.versions}

    def surviving(self) -> dict[VersionKey, Stored]:
        """Return the intact registered versions that no rollback has abandoned."""
        keys = (self._surviving & self._registered) - self._corrupt.keys()
        return {key: self._versions.stored[key] for key in sorted(keys)}

    def status(self) -> tuple[PublishedVersion, ...]:
        """Return all versions for ``staleflow status``, newest last."""
        return tuple(
            PublishedVersion(
                lineage=key.lineage,
                version=key.version,
                sha=stored.about.manifest.sha,
                nbytes=stored.about.manifest.nbytes,
                registered=key in self._registered,
                corrupt=self._corrupt.get(key, ""),
                pinned_by=self.pins.of(key),
            )
            for key, stored in sorted(self._versions.stored.items())
        )
