"""A relay: gives versions to readers near it, and gets each of them once, when the first reader asks.

- What it says a version is, is what the parameter server says. What it gives, it has compared with that.
- It gives a tensor as soon as that is right, whatever else of the version is still on its way: a tree of relays adds
  the time of a tensor for each level, not that of a model.
- It joins by saying that it is there, again and again; silence is leaving. Its versions are a cache: those that nobody
  has pinned go when there are ``keep_versions`` newer ones, and sooner where a newer one has no room.
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
    Sources,
    Status,
    Unpin,
)
from staleflow.servers.parameters import turns
from staleflow.servers.parameters.deltas import Deltas
from staleflow.servers.parameters.pins import Pins
from staleflow.servers.parameters.relay.arrivals import Arrivals
from staleflow.servers.parameters.relay.sources import Upstream
from staleflow.servers.parameters.turns import Looks, Turns
from staleflow.servers.parameters.versions import CorruptVersion, Scarce, VersionKey, Versions
from staleflow.servers.runner import Tasks

log = logging.getLogger(__name__)

JOIN_INTERVAL_S = 1.0
POLL_INTERVAL_S = 1.0
"""Whether the run is over."""
BUSY_MS = 200
MAPPED_AFTER_S = 4.0
"""A reader on this host that waits for the whole file is told after this long that it is still coming."""
GONE_S = 60.0
"""Without a word from the scheduler: the run is gone."""


class RelayService:
    """Answers every call of a relay; lives on one loop."""

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
        self._looks = Looks(versions)
        self.hello: Attach | None = None
        """How this relay attaches, once its endpoint is known."""

    # Calls -----------------------------------------------------------------------------------------------------------

    def on_call(self, call: Call) -> None:
        """Start what will answer."""
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
                call.reply(Status(values=self._status()))
            case _:
                call.refuse(Code.DENIED, f"a relay does not answer {type(call.body).__name__}")

    def on_drained(self) -> None:
        """Nothing is gathered from several messages here."""

    def drain(self) -> None:
        """What is under way may end."""

    def on_gone(self, peer: str) -> None:
        """Nothing is heard of a reader any more."""
        self._pins.forget(peer)

    def _later_manifest(self, call: Call, ask: GetManifest) -> None:
        try:
            self._manifests.begin(call.peer)
        except Refused as no:
            _refuse(call, no)
            return
        self._pins.add(ask.worker, VersionKey(ask.lineage, ask.version), call.key)

        async def answering() -> None:
            try:
                call.reply(await self._manifest(ask))
            except Refused as no:
                _refuse(call, no)
            finally:
                self._manifests.end(call.peer)

        self._tasks.start(answering())

    def _later_piece(self, call: Call, offset: int, piece: Coroutine[Any, Any, Data]) -> None:
        try:
            self._pieces.begin(call.peer)
        except Refused as no:
            piece.close()
            _refuse(call, no)
            return

        async def answering() -> None:
            try:
                data = await piece
            except Refused as no:
                _refuse(call, no)
            except OSError as error:  # nobody pinned it, and it went meanwhile; or it cannot be read
                call.refuse(Code.BAD_VERSION, str(error))
            else:
                call.reply(Chunk(offset=offset), [data])
            finally:
                self._pieces.end(call.peer)

        self._tasks.start(answering())

    async def _manifest(self, ask: GetManifest) -> ManifestReply:
        key = VersionKey(ask.lineage, ask.version)
        try:
            if ask.doubted:
                await self._look_at(key)
            manifest = await self._arrivals.manifest(key)
            path = await self._path(key, may_wait=ask.host == boot_id())
        except Refused:
            self._pins.remove(ask.worker, key)
            raise
        return ManifestReply(manifest=manifest, path=path, host=boot_id())

    async def _look_at(self, key: VersionKey) -> None:
        """Forget a version whose bytes are damaged: who asks the next time has it brought again. ``Refused`` then."""
        if (stored := self._versions.stored.get(key)) is None:
            return
        try:
            await self._looks.at(stored)
        except CorruptVersion as error:
            log.error("%s is damaged here and brought again: %s", key, error)
            if self._versions.stored.get(key) is stored:
                await asyncio.to_thread(self._versions.remove, self._versions.put_aside(key))
            raise Refused(Code.BAD_VERSION, f"{key} is damaged at this relay") from error
        except Scarce as error:
            raise Refused(Code.BAD_VERSION, str(error)) from error

    async def _path(self, key: VersionKey, *, may_wait: bool) -> str:
        """The file of a version that is here; empty while it comes."""
        if not may_wait and self._arrivals.coming(key):
            return ""
        try:
            async with asyncio.timeout(MAPPED_AFTER_S):
                return str((await self._arrivals.stored(key)).path.resolve())
        except TimeoutError:
            return ""

    async def _chunk(self, ask: GetChunk) -> Data:
        key = VersionKey(ask.lineage, ask.version)
        size = (await self._arrivals.manifest(key)).nbytes
        if ask.nbytes < 1 or not 0 <= ask.offset < size:
            raise Refused(Code.MALFORMED, f"{ask.nbytes} bytes at {ask.offset} are not in a version of {size} bytes")
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

    def _status(self) -> dict[str, Any]:
        versions = [
            {
                "lineage": key.lineage,
                "version": key.version,
                "sha": stored.about.manifest.sha,
                "nbytes": stored.about.manifest.nbytes,
                "pinned_by": self._pins.of(key),
            }
            for key, stored in sorted(self._versions.stored.items())
        ]
        return {"versions": versions, "coming": len(self._arrivals), "from": self._upstream.above}

    # Being there -----------------------------------------------------------------------------------------------------

    async def work(self) -> None:
        """Take a place in the tree, keep it, and end with the run. ``ConfigError`` if the run does not want it."""
        hello, attached = await self._attached()
        root = self._upstream.begin(reachable(attached.parameters, self._scheduler.address))
        log.info("gives weights of run %s at %s", attached.run, hello.endpoint)
        join = JoinRelays(worker=hello.worker, run=attached.run, endpoint=hello.endpoint, host=boot_id())
        async with asyncio.TaskGroup() as both:
            both.create_task(self._watch_run())
            both.create_task(self._stay(root, join))

    async def _stay(self, root: Client, join: JoinRelays) -> None:
        """Say again and again that this relay is there, and hang where it is told."""
        while True:
            try:
                place = await root.ask(join, Sources, timeout_s=None)
            except Refused as no:
                if no.code is Code.BUSY:  # more of its own questions wait there than may
                    await asyncio.sleep(JOIN_INTERVAL_S)
                    continue
                raise ConfigError("relay", str(join.worker), no.detail) from no
            self._upstream.hang_below(place.endpoints)
            await self._arrivals.collect()
            await asyncio.sleep(JOIN_INTERVAL_S)

    async def _watch_run(self) -> None:
        """End this process when the trainer is done, or the scheduler has not been heard of for long."""
        why = ""
        while not why:
            try:
                status = (await self._scheduler.ask(GetStatus(), Status, timeout_s=GONE_S)).values
            except Unavailable:
                why = f"nothing is heard of the scheduler for {GONE_S:.0f} s"
            else:
                why = "the run is over" if status.get("finished") or status.get("closed") else ""
                await asyncio.sleep(POLL_INTERVAL_S)
        log.info("leaves: %s", why)
        self._stop.set(why)

    async def _attached(self) -> tuple[Attach, AttachReply]:
        """The scheduler's answer once it knows the parameter server, too."""
        assert self.hello is not None
        while True:
            attached = await self._scheduler.ask(self.hello, AttachReply, timeout_s=None)
            if attached.parameters:
                return self.hello, attached
            await asyncio.sleep(JOIN_INTERVAL_S)


def _refuse(call: Call, no: Refused) -> None:
    call.refuse(no.code, no.detail, retry_after_ms=BUSY_MS if no.code is Code.BUSY else 0)
