"""Which versions there are for whom: registered, corrupt, pinned, in use.

- A version counts once the scheduler has registered it; one that it refuses is forgotten.
- What is deleted: not pinned, not in use by the scheduler's word, not among the newest ``keep_versions``. Where a new
  version would not fit into the budget or onto the disk, the oldest go, whatever ``keep_versions`` says and if they are
  bases of deltas. The newest one always stays.
"""

import asyncio
import logging
from contextlib import suppress
from typing import Any

from staleflow.net.client import Client
from staleflow.net.errors import Refused
from staleflow.process.rate_limited_log import RateLimitedLog
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.consistency.ids import TrainerTerm
from staleflow.protocols.wire.messages import (
    GetRetainedVersions,
    GetStatus,
    RegisterVersion,
    RegisterVersionReply,
    RetainedVersions,
    Status,
)
from staleflow.servers.parameters.pins import Pins
from staleflow.servers.parameters.turns import Looks
from staleflow.servers.parameters.versions import (
    About,
    CorruptVersion,
    NoRoom,
    Scarce,
    Staged,
    Stored,
    Unwritable,
    VersionKey,
    Versions,
)

log = logging.getLogger(__name__)

RETRY_INTERVAL_S = 1.0
"""After a no of now: the run is over, or a key is not allowed at present."""


class Catalog:
    """All versions of the folder. Lives on one loop; slow work on files happens in threads."""

    def __init__(self, versions: Versions, scheduler: Client, *, keep_versions: int, budget_bytes: int = 0) -> None:
        self.pins = Pins()
        self._versions = versions
        self._scheduler = scheduler
        self._keep_versions = keep_versions
        self._budget_bytes = budget_bytes
        self._registered: set[VersionKey] = set()
        self._recovered = asyncio.Event()
        """It is known which versions of the folder were registered before this process began."""
        self._corrupt: dict[VersionKey, str] = {}
        self._verifying = asyncio.Lock()
        self._looks = Looks(versions)
        self._said = RateLimitedLog()
        self.publishing = asyncio.Lock()
        """Held by whoever adds or registers versions."""
        self.grown = asyncio.Event()
        """Set when there is a version more: an older one may go."""

    # For pullers -----------------------------------------------------------------------------------------------------

    def find(self, key: VersionKey) -> Stored:
        """A version that may be served. ``Refused`` if there is none, or not yet."""
        if (stored := self._versions.stored.get(key)) is None:
            raise Refused(Code.BAD_VERSION, f"{key} is not here")
        if key in self._corrupt:
            raise Refused(Code.BAD_VERSION, self._corrupt[key])
        if key not in self._registered:
            raise Refused(Code.BUSY, f"{key} waits for the scheduler")
        return stored

    async def verified(self, worker: str, key: VersionKey, stored: Stored, *, doubted: bool) -> None:
        """Look at the bytes of a pinned version, closely if they are ``doubted``. ``Refused``, and no longer pinned, if
        they are corrupt, or cannot be read at present."""
        try:
            if doubted:
                await self._looks.at(stored)
                return
            async with self._verifying:  # a second reader finds the work done
                await asyncio.to_thread(self._versions.verify, stored)
        except CorruptVersion as error:
            self.pins.remove(worker, key)
            raise self.quarantined(key, stored, error) from error
        except Scarce as error:
            self.pins.remove(worker, key)
            raise Refused(Code.BUSY, str(error)) from error

    def quarantined(self, key: VersionKey, stored: Stored, error: Exception) -> Refused:
        """Serve a version no more whose bytes are wrong, or cannot be read. Returns what to say of it."""
        if self._versions.stored.get(key) is not stored:  # it was deleted meanwhile, or is published anew
            return Refused(Code.BAD_VERSION, f"{key} is not here")
        log.error("%s is corrupt and not served: %s", key, error)
        self._corrupt[key] = f"{key} is corrupt: {error}"
        return Refused(Code.BAD_VERSION, self._corrupt[key])

    # For the publisher -----------------------------------------------------------------------------------------------

    def lacks(self, about: About) -> bool:
        """True when the version must be stored; False when these bytes are here already.

        ``Refused`` conflict when it is published with other bytes; busy while that is not known.
        """
        key, known = about.key, self._versions.stored.get(about.key)
        if known is None:
            return True
        if known.about.manifest.sha == about.manifest.sha:
            return key in self._corrupt
        if key not in self._registered:
            raise Refused(Code.BUSY, f"{key} waits for the scheduler")
        raise Refused(Code.CONFLICT, f"{key} is published with other bytes: {known.about.manifest.sha}")

    async def stage(self, key: VersionKey, nbytes: int, coming: int) -> Staged:
        """A file to write the version into. Until it fits into the budget beside those ``coming``, and onto the disk,
        what is only kept by count, or as a base, is deleted.

        ``Refused`` busy when it does not fit even then, and denied when it never will.
        """
        budget = self._budget_bytes
        if nbytes > budget > 0:
            raise Refused(Code.DENIED, f"{key}: it has {nbytes} bytes; parameters.budget_mb allows {budget >> 20} MiB")
        while True:
            held = self._nbytes + coming
            if budget and held + nbytes > budget:
                if not await self._make_room():
                    full = f"{held >> 20} of {budget >> 20} MiB of parameters.budget_mb are in use"
                    raise Refused(Code.BUSY, f"{key}: it has {nbytes} bytes; {full}")
                continue
            try:
                return await asyncio.to_thread(self._versions.stage, key, nbytes)
            except NoRoom as error:
                if isinstance(error, Unwritable) or not await self._make_room():
                    self._log_no_room(error)
                    raise Refused(Code.BUSY, str(error)) from error

    def _log_no_room(self, error: Exception) -> None:
        """Once in a while: the publisher tries again five times a second."""
        if (more := self._said.due()) is not None:
            log.error("no room: %s%s", error, more)

    async def _make_room(self) -> bool:
        """Delete the oldest version that is only kept by count, or as a base; False when there is none. ``Refused``
        when the scheduler does not say what is in use: the run is over."""
        before = sorted(self._registered)[:-1]
        used = await self._in_use()
        for old in before:
            if old not in self._registered:  # somebody else made room meanwhile
                return True
            if old not in used and not self.pins.in_use(old):
                await self._delete(old)
                return True
        return False

    @property
    def _nbytes(self) -> int:
        return sum(stored.about.manifest.nbytes for stored in self._versions.stored.values())

    async def check_begun(self, term: TrainerTerm) -> None:
        """``Refused`` denied when no trainer has joined with that term, by the scheduler's word: whoever could name any
        would fence every trainer to come."""
        status = await self._scheduler.ask(GetStatus(), Status, timeout_s=None)
        if term > (newest := int(status.values["trainer_term"])):
            raise Refused(Code.DENIED, f"trainer term {term} has not begun; the newest one is {newest}")

    async def keep(self, staged: Staged, about: About, *, in_place: bool) -> None:
        """Make a version durable. ``Refused`` stale when its bytes are not those of the manifest: write them again."""
        key = about.key
        try:
            stored = await asyncio.to_thread(self._versions.keep, staged, about, in_place=in_place)
        except CorruptVersion as error:
            log.error("a publish is refused: %s", error)
            raise Refused(Code.STALE, f"{error}; begin again") from error
        except (NoRoom, Scarce) as error:
            self._log_no_room(error)
            raise Refused(Code.BUSY, str(error)) from error
        self._versions.stored[key] = stored
        self._corrupt.pop(key, None)

    async def register(self, about: About) -> RegisterVersionReply:
        """Tell the scheduler of a durable version; forget it if the answer is no. One that is registered is not asked
        for again: the no to a trainer that is fenced meanwhile would cost the run a version that it uses."""
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
        except Refused as no:
            log.warning("%s is not registered: %s", key, no)
            await asyncio.to_thread(self._versions.remove, self._versions.put_aside(key))
            raise
        self._registered.add(key)
        await asyncio.to_thread(self._versions.reach, self._versions.reached.run, key)
        self.grown.set()
        log.info("%s is published, %d bytes, sha %s", key, manifest.nbytes, manifest.sha[:12])
        return registered

    # Housekeeping ----------------------------------------------------------------------------------------------------

    async def recover(self) -> None:
        """Find out which of the versions in the folder are registered; register, or forget, the others. While nobody
        says it, all of them stay."""
        while (used := await self._used()) is None:  # noqa: ASYNC110
            await asyncio.sleep(RETRY_INTERVAL_S)
        self._registered |= used & self._versions.stored.keys()
        self._recovered.set()
        for key in sorted(self._versions.stored.keys() - self._registered):
            async with self.publishing:
                if (stored := self._versions.stored.get(key)) is not None:
                    with suppress(Refused):
                        await self.register(stored.about)

    async def collect(self) -> None:
        """Delete what is neither used, nor pinned, nor new."""
        before = sorted(self._registered)
        if (used := await self._used()) is None:
            return
        keep = used | set(before[-self._keep_versions :])
        for key in before:
            if key in self._registered and key not in keep and not self.pins.of(key):
                await self._delete(key)

    async def _delete(self, key: VersionKey) -> None:
        """It is forgotten at once; its room is there when this returns."""
        self._registered.discard(key)
        corrupt = self._corrupt.pop(key, None)
        aside = self._versions.put_aside(key, reuse=corrupt is None)
        log.info("%s is deleted", key)
        await asyncio.to_thread(self._versions.remove, aside)

    async def _used(self) -> set[VersionKey] | None:
        """What is in use; None when the run is over."""
        try:
            return await self._in_use()
        except Refused:
            return None

    async def _in_use(self) -> set[VersionKey]:
        """What the scheduler says is in use. ``Refused`` when the run is over."""
        answer = await self._scheduler.ask(GetRetainedVersions(), RetainedVersions, timeout_s=None)
        return {VersionKey(*key) for key in answer.versions}

    def status(self) -> list[dict[str, Any]]:
        """All versions, newest last."""
        return [
            {
                "lineage": key.lineage,
                "version": key.version,
                "sha": stored.about.manifest.sha,
                "nbytes": stored.about.manifest.nbytes,
                "registered": key in self._registered,
                "corrupt": self._corrupt.get(key, ""),
                "pinned_by": self.pins.of(key),
            }
            for key, stored in sorted(self._versions.stored.items())
        ]
