"""A relay: serves versions to nearby readers and fetches each version once, at the first request.

- The manifest of a version always comes from the parameter server. Every byte is verified against it before it is
  served.
- A tensor is served as soon as it is verified, while the rest of the version is still arriving. So each level of a tree
  of relays adds the transfer time of a tensor, not of a model.
- A relay joins and stays in the tree by periodic messages; silence means that it left. Its versions are a cache:
  unpinned ones are deleted when ``keep_versions`` newer ones exist, and earlier if a newer one has no room.
"""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from staleflow.configs.errors import ConfigError
from staleflow.configs.schema import DeltaKind
from staleflow.net.addresses import reachable
from staleflow.net.client import Client
from staleflow.net.endpoint import Call
from staleflow.net.errors import Refused, Unavailable
from staleflow.process.daemon import Stop
from staleflow.process.host import boot_id
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.wire.codec import Data
from staleflow.protocols.wire.messages import (
    Attach,
    AttachReply,
    Chunk,
    Done,
    GetChunk,
    GetDelta,
    GetManifest,
    GetStatus,
    JoinRelays,
    ManifestReply,
    RelayStatus,
    SchedulerStatus,
    Sources,
    Unpin,
)
from staleflow.protocols.wire.messages.status import StoredVersion
from staleflow.servers.parameters import turns
from staleflow.servers.parameters.deltas import Deltas
from staleflow.servers.parameters.pins import Pins
from staleflow.servers.parameters.relay.arrivals import Arrivals
from staleflow.servers.parameters.relay.sources import Upstream
from staleflow.servers.parameters.turns import FullChecks, Turns
from staleflow.servers.parameters.versions import CorruptVersion, Scarce, VersionKey, Versions
from staleflow.servers.runner import Tasks

log = logging.getLogger(__name__)

JOIN_INTERVAL_S = 1.0
POLL_INTERVAL_S = 1.0
"""Poll interval for the end of the run."""
BUSY_MS = 200
MAPPED_TIMEOUT_S = 4.0
"""Time that a reader on this host waits for the whole file. After that its reply has no path, and it reads in
chunks."""
SCHEDULER_TIMEOUT_S = 60.0
"""Silence of the scheduler after which the run is considered gone."""


class RelayService:
    """Dispatch every call of a relay. Owned by one event loop."""

    def __init__(
        self,
        versions: Versions,
        scheduler: Client,
        upstream: Upstream,
        tasks: Tasks,
        stop: Stop,
        *,
        keep_versions: int,
        chunk_bytes: int,
        delta: DeltaKind,
    ) -> None:
        self._versions = versions
        self._scheduler = scheduler
        self._upstream = upstream
        self._tasks = tasks
        self._stop = stop
        self._chunk_bytes = chunk_bytes
        self._deltas = Deltas(versions, delta)
        self._pins = Pins()
        self._arrivals = Arrivals(
            versions, self._deltas, upstream, self._pins, tasks.start, keep_versions=keep_versions
        )
        self._pieces = Turns(turns.MAX_PIECES)
        self._manifests = Turns(turns.MAX_MANIFESTS)
        self._full_checks = FullChecks(versions)
        self.hello: Attach | None = None
        """Attach message of this relay, once its endpoint is known."""

    # Calls -----------------------------------------------------------------------------------------------------------

    def on_call(self, call: Call) -> None:
        """Reply now, or start the task that will."""
        match call.body:
            case GetManifest() as ask:
                self._later_manifest(call, ask)
            case GetChunk() as ask:
                self._later_piece(call, ask.offset, self._chunk(ask))
            case GetDelta() as ask:
                self._later_piece(call, ask.offset, self._delta(ask))
            case Unpin() as ask:
                unpin = self._pins.keep_as_base if ask.base else self._pins.remove
                unpin(ask.worker, VersionKey(ask.lineage, ask.version))
                call.reply(Done())
            case GetStatus():
                call.reply(self._status())
            case _:
                call.refuse(Code.DENIED, f"a relay does not serve {type(call.body).__name__}")

    def on_drained(self) -> None:
        """No batching across messages in a relay."""

    def drain(self) -> None:
        """Nothing to stop: requests in progress may finish."""

    def on_gone(self, peer: str) -> None:
        """Remove the pins of a lost reader."""
        self._pins.forget(peer)

    def _later_manifest(self, call: Call, ask: GetManifest) -> None:
        try:
            self._manifests.begin(call.peer)
        except Refused as refusal:
            _refuse(call, refusal)
            return
        self._pins.add(ask.worker, VersionKey(ask.lineage, ask.version), call.key)

        async def respond() -> None:
            try:
                call.reply(await self._manifest(ask))
            except Refused as refusal:
                _refuse(call, refusal)
            finally:
                self._manifests.end(call.peer)

        self._tasks.start(respond())

    def _later_piece(self, call: Call, offset: int, piece: Coroutine[Any, Any, Data]) -> None:
        try:
            self._pieces.begin(call.peer)
        except Refused as refusal:
            piece.close()
            _refuse(call, refusal)
            return

        async def respond() -> None:
            try:
                data = await piece
            except Refused as refusal:
                _refuse(call, refusal)
            except OSError as error:  # not pinned and deleted in the meantime, or unreadable
                call.refuse(Code.BAD_VERSION, str(error))
            else:
                call.reply(Chunk(offset=offset), [data])
            finally:
                self._pieces.end(call.peer)

        self._tasks.start(respond())

    async def _manifest(self, ask: GetManifest) -> ManifestReply:
        key = VersionKey(ask.lineage, ask.version)
        try:
            if ask.doubted:
                await self._verify(key)
            manifest = await self._arrivals.manifest(key)
            path = await self._path(key, may_wait=ask.host == boot_id())
        except Refused:
            self._pins.remove(ask.worker, key)
            raise
        return ManifestReply(manifest=manifest, path=path, host=boot_id())

    async def _verify(self, key: VersionKey) -> None:
        """Verify all bytes of a version. If they are damaged, delete it, so that the next request fetches it again,
        and raise ``Refused``."""
        if (stored := self._versions.stored.get(key)) is None:
            return
        try:
            await self._full_checks.check(stored)
        except CorruptVersion as error:
            log.error("%s is damaged here and will be fetched again: %s", key, error)
            if self._versions.stored.get(key) is stored:
                await asyncio.to_thread(self._versions.remove, self._versions.put_aside(key))
            raise Refused(Code.BAD_VERSION, f"{key} is damaged at this relay") from error
        except Scarce as error:
            raise Refused(Code.BAD_VERSION, str(error)) from error

    async def _path(self, key: VersionKey, *, may_wait: bool) -> str:
        """Return the file of a version that is here; empty while it is arriving."""
        if not may_wait and self._arrivals.is_arriving(key):
            return ""
        try:
            async with asyncio.timeout(MAPPED_TIMEOUT_S):
                return str((await self._arrivals.stored(key)).path.resolve())
        except TimeoutError:
            return ""

    async def _chunk(self, ask: GetChunk) -> Data:
        key = VersionKey(ask.lineage, ask.version)
        size = (await self._arrivals.manifest(key)).nbytes
        if ask.nbytes < 1 or not 0 <= ask.offset < size:
            raise Refused(Code.MALFORMED, f"{ask.nbytes} bytes at {ask.offset} are outside a version of {size} bytes")
        data = await self._arrivals.read(key, ask.offset, min(ask.nbytes, self._chunk_bytes))
        if not data:
            raise FileNotFoundError(f"{key} ends before byte {ask.offset}")
        return data

    async def _delta(self, ask: GetDelta) -> bytes:
        base = VersionKey(ask.base_lineage, ask.base_version)
        if (old := self._versions.stored.get(base)) is None:
            raise Refused(Code.BAD_VERSION, f"{base} is not here")
        manifest = await self._arrivals.manifest(VersionKey(ask.lineage, ask.version))
        self._deltas.check(ask, old.about.manifest, manifest)
        return await self._deltas.make(ask, old, await self._arrivals.span(ask))

    def _status(self) -> RelayStatus:
        versions = tuple(
            StoredVersion(
                lineage=key.lineage,
                version=key.version,
                sha=stored.about.manifest.sha,
                nbytes=stored.about.manifest.nbytes,
                pinned_by=self._pins.of(key),
            )
            for key, stored in sorted(self._versions.stored.items())
        )
        return RelayStatus(versions=versions, coming=len(self._arrivals), parent=self._upstream.above)

    # Membership -----------------------------------------------------------------------------------------------------

    async def work(self) -> None:
        """Join the tree, stay in it, and end with the run. Raise ``ConfigError`` if the run rejects this relay."""
        hello, attached = await self._attached()
        root = self._upstream.begin(reachable(attached.parameters, self._scheduler.address))
        log.info("serving weights of run %s at %s", attached.run, hello.endpoint)
        join = JoinRelays(worker=hello.worker, run=attached.run, endpoint=hello.endpoint, host=boot_id())
        async with asyncio.TaskGroup() as both:
            both.create_task(self._watch_run())
            both.create_task(self._stay(root, join))

    async def _stay(self, root: Client, join: JoinRelays) -> None:
        """Renew the membership periodically and move below the parent that the reply names."""
        while True:
            try:
                place = await root.ask(join, Sources, timeout_s=None)
            except Refused as refusal:
                if refusal.code is Code.BUSY:  # too many requests of this relay are in progress there
                    await asyncio.sleep(JOIN_INTERVAL_S)
                    continue
                raise ConfigError("relay", str(join.worker), refusal.detail) from refusal
            self._upstream.set_parent(place.endpoints)
            await self._arrivals.collect()
            await asyncio.sleep(JOIN_INTERVAL_S)

    async def _watch_run(self) -> None:
        """Stop this process when the training is finished, or after a long silence of the scheduler."""
        why = ""
        while not why:
            try:
                status = await self._scheduler.ask(GetStatus(), SchedulerStatus, timeout_s=SCHEDULER_TIMEOUT_S)
            except Unavailable:
                why = f"no reply from the scheduler for {SCHEDULER_TIMEOUT_S:.0f} s"
            else:
                why = "the run is over" if status.finished or status.closed else ""
                await asyncio.sleep(POLL_INTERVAL_S)
        log.info("relay stops: %s", why)
        self._stop.set(why)

    async def _attached(self) -> tuple[Attach, AttachReply]:
        """Attach, and repeat until the scheduler knows the parameter server, too."""
        assert self.hello is not None
        while True:
            attached = await self._scheduler.ask(self.hello, AttachReply, timeout_s=None)
            if attached.parameters:
                return self.hello, attached
            await asyncio.sleep(JOIN_INTERVAL_S)


def _refuse(call: Call, refusal: Refused) -> None:
    call.refuse(refusal.code, refusal.detail, retry_after_ms=BUSY_MS if refusal.code is Code.BUSY else 0)
