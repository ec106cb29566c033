"""The parameter server: receives versions from the trainer, registers them, and serves them to readers.

- Order of a publish: the bytes are verified and visible in the folder, then ``RegisterVersion`` is sent to the
  scheduler, then the publisher gets its reply. A version is served only once it is registered.
- A pull pins its version for the worker until ``Unpin``, or until the worker is lost.
- Nothing slow runs on the event loop: hashing, syncing and reading run in threads, waits for the scheduler in tasks.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from staleflow.configs.errors import ConfigError
from staleflow.configs.schema import DeltaKind
from staleflow.net.addresses import check_connect
from staleflow.net.client import Client
from staleflow.net.endpoint import Call
from staleflow.net.errors import Refused
from staleflow.process.host import boot_id
from staleflow.process.rate_limited_log import RateLimitedLog
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.wire.manifest import MAX_BYTES, check
from staleflow.protocols.wire.messages import (
    BeginPublish,
    BeginPublishReply,
    Chunk,
    CommitPublish,
    Done,
    GetChunk,
    GetDelta,
    GetManifest,
    GetSources,
    GetStatus,
    JoinRelays,
    ManifestReply,
    ParametersStatus,
    PublishChunk,
    RegisterVersionReply,
    Sources,
    Unpin,
    WrittenSpan,
)
from staleflow.protocols.wire.spans import by_tensor
from staleflow.servers.parameters import turns
from staleflow.servers.parameters.catalog import Catalog
from staleflow.servers.parameters.deltas import Deltas
from staleflow.servers.parameters.mirror import Mirror
from staleflow.servers.parameters.tree import Tree
from staleflow.servers.parameters.turns import Turns
from staleflow.servers.parameters.uploads import Upload, Uploads
from staleflow.servers.parameters.versions import About, NoRoom, Stored, VersionKey, Versions
from staleflow.servers.runner import Answer, Handled, Service, Tasks
from staleflow.store.disk_errors import Scarce

log = logging.getLogger(__name__)

BUSY_MS = 200
"""Retry delay in milliseconds sent with a ``BUSY`` reply."""
COLLECT_INTERVAL_S = 2.0


class Direct(NamedTuple):
    """Version that a trainer serves to readers itself."""

    key: VersionKey
    endpoint: str
    peer: str


class ParameterService(Service):
    """The parameter server without its socket."""

    def __init__(
        self,
        versions: Versions,
        scheduler: Client,
        tasks: Tasks,
        *,
        keep_versions: int,
        chunk_bytes: int,
        delta: DeltaKind = "compressed",
        budget_bytes: int = 0,
        mirror: Callable[[str], Mirror] | None = None,
    ) -> None:
        """``mirror``: opens the mirror of the run by its id, once this server is attached. None: no mirror."""
        super().__init__(tasks, retry_ms=BUSY_MS)
        self._versions = versions
        self._chunk_bytes = chunk_bytes
        self._catalog = Catalog(versions, scheduler, keep_versions=keep_versions, budget_bytes=budget_bytes)
        self._uploads = Uploads(versions)
        self._deltas = Deltas(versions, delta)
        self._tree = Tree()
        self._pieces = Turns(turns.MAX_PIECES)
        self._direct: Direct | None = None
        self._open_mirror = mirror
        self._mirror: Mirror | None = None
        self.run = ""
        """Id of the run; "" until the scheduler has attached this server."""
        self._beginning = asyncio.Lock()
        self._log_limit = RateLimitedLog()
        self._draining = False

    def handle(self, call: Call) -> Handled:
        match call.body:
            case GetManifest() as ask:
                return self._manifest(call, ask)
            case GetChunk() as ask:
                return self._chunk(call, ask)
            case GetDelta() as ask:
                return self._delta(call, ask)
            case Unpin() as ask:
                return self._unpin(call, ask)
            case BeginPublish() as ask:
                return partial(self._begin, call, ask)
            case PublishChunk() as ask:
                return partial(self._write, call, ask)
            case CommitPublish() as ask:
                return partial(self._commit, call, ask)
            case JoinRelays() as ask:
                return self._join(call, ask)
            case GetSources() as ask:
                return self._sources(call, ask)
            case GetStatus():
                return self._status()
            case _:
                raise Refused(Code.DENIED, f"the parameter server does not serve {type(call.body).__name__}")

    def drain(self) -> None:
        """Reject new uploads; those in progress may finish."""
        self._draining = True
        if self._mirror is not None:
            self._mirror.close()

    def on_gone(self, peer: str) -> None:
        """Release everything that a lost worker held: pins, uploads, its place in the tree, its direct transfers."""
        self._catalog.pins.forget(peer)
        self._uploads.leave(peer)
        self._tree.leave(peer)
        if self._direct is not None and self._direct.peer == peer:
            self._direct = None

    # Publishing ------------------------------------------------------------------------------------------------------

    async def _begin(self, call: Call, ask: BeginPublish) -> BeginPublishReply:
        if self._draining:
            raise Refused(Code.BUSY, "the parameter server is stopping")
        if not 0 <= ask.nbytes <= MAX_BYTES:
            raise Refused(Code.MALFORMED, f"the version has {ask.nbytes} bytes; 0 to {MAX_BYTES} are allowed")
        if self._uploads.is_newest(ask.trainer_term):
            await self._catalog.check_begun(ask.trainer_term)
        async with self._beginning:
            upload = await self._uploads.resume(call.peer, ask)
            if upload is None:
                key = VersionKey(ask.lineage, ask.version)
                staged = await self._catalog.stage(key, ask.nbytes, self._uploads.nbytes)
                upload = self._uploads.add(call.peer, ask, staged)
        return BeginPublishReply(upload=upload.number, path=str(upload.staged.path.resolve()), host=boot_id())

    async def _write(self, call: Call, ask: PublishChunk) -> Done:
        upload = self._uploads.find(ask.upload, call.peer)
        if upload.committing is not None:
            raise Refused(Code.STALE, f"upload {ask.upload} is already committed")
        if len(call.frames) != 1:
            raise Refused(Code.MALFORMED, f"{len(call.frames)} frames received; a chunk is one frame")
        end, nbytes = ask.offset + call.frames[0].nbytes, upload.announced.nbytes
        if ask.offset < 0 or end > nbytes:
            raise Refused(Code.MALFORMED, f"bytes {ask.offset} to {end} are outside a version of {nbytes} bytes")
        try:
            await asyncio.to_thread(self._versions.write, upload.staged, ask.offset, call.frames[0])
        except FileNotFoundError as error:  # it was discarded in the meantime
            raise Refused(Code.STALE, f"unknown upload: {ask.upload}; begin again") from error
        except NoRoom as error:
            if (more := self._log_limit.due()) is not None:
                log.error("no room: %s", f"{error}{more}")
            raise Refused(Code.BUSY, str(error)) from error
        return Done()

    async def _commit(self, call: Call, ask: CommitPublish) -> RegisterVersionReply:
        """Commit an upload, or return the outcome of an earlier commit of it."""
        check(ask.manifest)
        if ask.direct:
            _check_endpoint(ask.direct)
        tiles = None if ask.spans is None else by_tensor(ask.manifest, ask.spans)
        upload = self._uploads.find(ask.upload, call.peer)
        about = upload.commit(ask.manifest, ask.spans)
        if ask.direct:  # before registration: readers may come as soon as the scheduler knows the version
            self._direct = Direct(about.key, ask.direct, call.peer)
        if upload.committing is None:
            publishing = self._publish(upload, about, tiles, in_place=ask.in_place)
            upload.committing = self._tasks.start(_outcome(publishing))
        committing = upload.committing
        outcome = await asyncio.shield(committing)
        self._uploads.forget_finished()
        if isinstance(outcome, Refused):
            if outcome.code is Code.BUSY and upload.committing is committing:
                upload.committing = None  # the publisher retries, unless it is lost
            raise outcome
        return outcome

    async def _publish(
        self, upload: Upload, about: About, tiles: list[list[WrittenSpan]] | None, *, in_place: bool
    ) -> RegisterVersionReply:
        async with self._catalog.publishing:
            if tiles is not None:
                about, in_place = await self._catalog.digested(upload.staged, about, tiles), True
            try:
                lacked = self._catalog.lacks(about)
            except Refused as refusal:
                if refusal.code is not Code.BUSY:
                    await asyncio.to_thread(self._versions.discard, upload.staged)
                raise
            if lacked:
                await self._catalog.keep(upload.staged, about, in_place=in_place)
            else:
                await asyncio.to_thread(self._versions.discard, upload.staged)
            return await self._catalog.register(about)

    # Pulling ---------------------------------------------------------------------------------------------------------

    def _manifest(self, call: Call, ask: GetManifest) -> Handled:
        key = VersionKey(ask.lineage, ask.version)
        stored = self._catalog.find(key)
        # Pinned before the coroutine starts: an Unpin that follows the request must find the pin.
        self._catalog.pins.add(ask.worker, key, call.key)
        return partial(self._verified_manifest, ask, key, stored)

    async def _verified_manifest(self, ask: GetManifest, key: VersionKey, stored: Stored) -> ManifestReply:
        await self._catalog.verified(ask.worker, key, stored, doubted=ask.doubted)
        direct = self._direct.endpoint if self._direct is not None and self._direct.key == key else ""
        path, host = str(stored.path.resolve()), boot_id()
        mirrored = ask.mirror and ask.host != host and self._mirror is not None and await self._mirror.has(key)
        return ManifestReply(manifest=stored.about.manifest, path=path, host=host, direct=direct, mirrored=mirrored)

    def _unpin(self, _: Call, ask: Unpin) -> Done:
        self._catalog.pins.release(ask)
        return Done()

    def _chunk(self, call: Call, ask: GetChunk) -> Handled:
        """Return at most ``chunk_bytes`` of the requested bytes."""
        key = VersionKey(ask.lineage, ask.version)
        stored = self._catalog.find(key)
        size = stored.about.manifest.nbytes
        if ask.nbytes < 1 or not 0 <= ask.offset < size:
            raise Refused(Code.MALFORMED, f"{ask.nbytes} bytes at {ask.offset} are outside a version of {size} bytes")
        return partial(self._read, call.peer, ask, key, stored)

    async def _read(self, peer: str, ask: GetChunk, key: VersionKey, stored: Stored) -> Answer:
        with self._pieces.turn(peer):
            nbytes = min(ask.nbytes, self._chunk_bytes)
            try:
                data = await asyncio.to_thread(self._versions.read, stored, ask.offset, nbytes)
            except FileNotFoundError:  # not pinned, and deleted in the meantime
                data = b""
            except Scarce:
                raise
            except OSError as error:
                raise self._catalog.quarantined(key, stored, error) from error
        if not data:
            raise Refused(Code.BAD_VERSION, f"{stored.path.name} is gone, or ends before byte {ask.offset}")
        return Chunk(offset=ask.offset), [data]

    def _delta(self, call: Call, ask: GetDelta) -> Handled:
        """Return a delta from a version that the reader has. If that version is gone, the reader fetches the new one
        whole."""
        old = self._catalog.find(VersionKey(ask.base_lineage, ask.base_version))
        new = self._catalog.find(VersionKey(ask.lineage, ask.version))
        self._deltas.check(ask, old.about.manifest, new.about.manifest)
        return partial(self._make_delta, call.peer, ask, old, new)

    async def _make_delta(self, peer: str, ask: GetDelta, old: Stored, new: Stored) -> Answer:
        with self._pieces.turn(peer):
            try:
                return Chunk(offset=ask.offset), [await self._deltas.make(ask, old, new)]
            except OSError as error:  # whichever of the two is bad: a read of the whole version will show it
                raise Refused(Code.BAD_VERSION, str(error)) from error

    def _join(self, call: Call, ask: JoinRelays) -> Sources:
        """Add or refresh a relay in the tree and return its sources."""
        if self._draining or not self.run:
            raise Refused(Code.BUSY, "the parameter server is starting, or stopping")
        if ask.run != self.run:
            raise Refused(Code.CONFLICT, f'the relay is of run "{ask.run}"; this is run "{self.run}"')
        _check_endpoint(ask.endpoint)
        return Sources(endpoints=self._tree.join(call.peer, ask.endpoint, ask.host))

    def _sources(self, call: Call, ask: GetSources) -> Sources:
        return Sources(endpoints=self._tree.sources(call.peer, ask.host))

    def _status(self) -> ParametersStatus:
        versions, relays = self._catalog.status(), self._tree.status()
        trouble = "" if self._mirror is None else self._mirror.trouble
        return ParametersStatus(versions=versions, uploads=len(self._uploads), relays=relays, mirror=trouble)

    async def work(self) -> None:
        """Recover the versions in the folder, then delete unneeded ones until cancelled."""
        await self._catalog.recover()
        if self._open_mirror is not None:
            self._mirror = self._open_mirror(self.run)
            self._tasks.start(self._mirror.work())
        while True:
            self._catalog.grown.clear()
            if await self._catalog.collect() and self._mirror is not None:
                surviving, registered = self._catalog.surviving(), self._catalog.judged
                self._mirror.update(self._catalog.lineage, surviving, registered)
            await self._uploads.forget_left()
            with suppress(TimeoutError):
                async with asyncio.timeout(COLLECT_INTERVAL_S):
                    await self._catalog.grown.wait()


async def _outcome(publishing: Coroutine[Any, Any, RegisterVersionReply]) -> RegisterVersionReply | Refused:
    """Return the result or the refusal as a value: a refused publish must not fail a task of this process."""
    try:
        return await publishing
    except Refused as refusal:
        return refusal


def _check_endpoint(endpoint: str) -> None:
    """Raise ``Refused`` if the endpoint is not one that readers can be sent to."""
    try:
        check_connect(endpoint)
    except ConfigError as error:
        raise Refused(Code.MALFORMED, str(error)) from error
