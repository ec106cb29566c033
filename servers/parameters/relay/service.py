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
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from functools import partial

from staleflow.configs.errors import ConfigError
from staleflow.configs.schema import DeltaKind
from staleflow.net.addresses import reachable
from staleflow.net.client import Client
from staleflow.net.endpoint import Call
from staleflow.net.errors import Refused, Unavailable
from staleflow.process.daemon import Stop
from staleflow.process.host import boot_id
from staleflow.protocols.consistency.effects import Code
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
from staleflow.servers.parameters.versions import CorruptVersion, VersionKey, Versions
from staleflow.servers.runner import Answer, Handled, Service, Tasks
from staleflow.store.disk_errors import Scarce

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


class RelayService(Service):
    """A relay without its socket."""

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
        super().__init__(tasks, retry_ms=BUSY_MS)
        self._versions = versions
        self._scheduler = scheduler
        self._upstream = upstream
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

    def handle(self, call: Call) -> Handled:
        match call.body:
            case GetManifest() as ask:
                return self._manifest(call, ask)
            case GetChunk() as ask:
                return partial(self._chunk, call, ask)
            case GetDelta() as ask:
                return partial(self._delta, call, ask)
            case Unpin() as ask:
                return self._unpin(call, ask)
            case GetStatus():
                return self._status()
            case _:
                raise Refused(Code.DENIED, f"a relay does not serve {type(call.body).__name__}")

    def on_gone(self, peer: str) -> None:
        """Remove the pins of a lost reader."""
        self._pins.forget(peer)

    def _unpin(self, _: Call, ask: Unpin) -> Done:
        self._pins.release(ask)
        return Done()

    def _manifest(self, call: Call, ask: GetManifest) -> Handled:
        with ExitStack() as resources:
            resources.enter_context(self._manifests.turn(call.peer))
            # Pinned before the coroutine starts: an Unpin that follows the request must find the pin.
            self._pins.add(ask.worker, VersionKey(ask.lineage, ask.version), call.key)
            return partial(self._arrived_manifest, ask, resources.pop_all())

    async def _arrived_manifest(self, ask: GetManifest, turn: ExitStack) -> ManifestReply:
        key = VersionKey(ask.lineage, ask.version)
        with turn:
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

    async def _chunk(self, call: Call, ask: GetChunk) -> Answer:
        key = VersionKey(ask.lineage, ask.version)
        with self._turn(call):
            size = (await self._arrivals.manifest(key)).nbytes
            if ask.nbytes < 1 or not 0 <= ask.offset < size:
                outside = f"{ask.nbytes} bytes at {ask.offset} are outside a version of {size} bytes"
                raise Refused(Code.MALFORMED, outside)
            data = await self._arrivals.read(key, ask.offset, min(ask.nbytes, self._chunk_bytes))
        if not data:
            raise Refused(Code.BAD_VERSION, f"{key} ends before byte {ask.offset}")
        return Chunk(offset=ask.offset), [data]

    async def _delta(self, call: Call, ask: GetDelta) -> Answer:
        base = VersionKey(ask.base_lineage, ask.base_version)
        with self._turn(call):
            if (old := self._versions.stored.get(base)) is None:
                raise Refused(Code.BAD_VERSION, f"{base} is not here")
            manifest = await self._arrivals.manifest(VersionKey(ask.lineage, ask.version))
            self._deltas.check(ask, old.about.manifest, manifest)
            return Chunk(offset=ask.offset), [await self._deltas.make(ask, old, await self._arrivals.span(ask))]

    @contextmanager
    def _turn(self, call: Call) -> Generator[None]:
        """Count the request, and refuse it if its version was deleted in the meantime or is unreadable."""
        with self._pieces.turn(call.peer):
            try:
                yield
            except OSError as error:
                raise Refused(Code.BAD_VERSION, str(error)) from error

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
