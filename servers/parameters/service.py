"""The parameter server: takes versions from the trainer, registers them, and gives them to whoever pulls.

- The order of a publish: bytes verified and visible in the folder, then ``RegisterVersion`` at the scheduler, then the
  answer. A version is served only once it is registered.
- A pull pins its version for the worker until ``Unpin``, or until nothing is heard of the worker.
- Nothing slow runs on the loop: hashing, syncing and reading happen in threads, waiting for the scheduler in tasks.
"""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.wire.codec import ProtocolError
from staleflow.protocols.wire.manifest import check
from staleflow.protocols.wire.messages import (
    BeginPublish,
    Chunk,
    CommitPublish,
    Done,
    GetChunk,
    GetManifest,
    GetStatus,
    ManifestOf,
    PublishChunk,
    PublishTo,
    Registered,
    Reply,
    Status,
    Unpin,
)
from staleflow.runtime.client import Client
from staleflow.runtime.endpoint import Call
from staleflow.runtime.errors import Refused
from staleflow.runtime.host import boot_id
from staleflow.servers.attached import Tasks
from staleflow.servers.parameters.catalog import Catalog
from staleflow.servers.parameters.uploads import Upload, Uploads
from staleflow.servers.parameters.versions import About, NoRoom, Stored, VersionKey, Versions

log = logging.getLogger(__name__)

BUSY_MS = 200
"""A client asks again after this long for what is not ready yet."""
COLLECT_EVERY_S = 2.0


class ParameterService:
    """Answers every call of the parameter server; lives on one loop."""

    def __init__(
        self, versions: Versions, scheduler: Client, tasks: Tasks, *, keep_versions: int, chunk_bytes: int
    ) -> None:
        self._versions = versions
        self._tasks = tasks
        self._chunk_bytes = chunk_bytes
        self._catalog = Catalog(versions, scheduler, keep_versions=keep_versions)
        self._uploads = Uploads(versions)
        self._draining = False

    # Calls -----------------------------------------------------------------------------------------------------------

    def on_call(self, call: Call) -> None:
        """Answer now, or start the task that will."""
        try:
            self._dispatch(call)
        except Refused as no:
            _refuse(call, no)
        except ProtocolError as error:
            call.refuse(error.code, error.detail)
        except NoRoom as error:
            log.error("no room: %s", error)
            call.refuse(Code.BUSY, str(error), retry_after_ms=1000)

    def on_drained(self) -> None:
        """Nothing is gathered from several messages here."""

    def drain(self) -> None:
        """No new uploads; what is under way may end."""
        self._draining = True

    def on_gone(self, peer: str) -> None:
        """Nothing is heard of a worker any more."""
        self._catalog.pins.forget(peer)
        self._uploads.forget_peer(peer)

    def _dispatch(self, call: Call) -> None:
        match call.body:
            case GetManifest() as ask:
                key = VersionKey(ask.lineage, ask.version)
                stored = self._catalog.find(key)
                self._catalog.pins.add(ask.worker, key)  # now: a later Unpin must find it
                self._later(call, self._manifest(ask.worker, key, stored))
            case GetChunk() as ask:
                self._later_chunk(call, ask)
            case Unpin() as ask:
                self._catalog.pins.remove(ask.worker, VersionKey(ask.lineage, ask.version))
                call.reply(Done())
            case BeginPublish() as ask:
                call.reply(self._begin(call.peer, ask))
            case PublishChunk() as ask:
                self._write(call, ask)
            case CommitPublish() as ask:
                self._later(call, self._commit(ask.upload))
            case GetStatus():
                call.reply(Status(values={"versions": self._catalog.status(), "uploads": len(self._uploads)}))
            case _:
                call.refuse(Code.DENIED, f"the parameter server does not answer {type(call.body).__name__}")

    def _later(self, call: Call, answer: Coroutine[Any, Any, Reply]) -> None:
        async def answering() -> None:
            try:
                reply = await answer
            except Refused as no:
                _refuse(call, no)
            else:
                call.reply(reply)

        self._tasks.start(answering())

    # Publishing ------------------------------------------------------------------------------------------------------

    def _begin(self, peer: str, ask: BeginPublish) -> PublishTo:
        if self._draining:
            raise Refused(Code.BUSY, "the parameter server is draining")
        check(ask.manifest)
        about = About(
            lineage=ask.lineage,
            version=ask.version,
            trainer_term=ask.trainer_term,
            batch=ask.batch,
            manifest=ask.manifest,
        )
        self._uploads.check_term(about)
        self._catalog.lacks(about)
        upload = self._uploads.begin(peer, about)
        return PublishTo(upload=upload.number, path=str(upload.staged.path.resolve()), host=boot_id())

    def _write(self, call: Call, ask: PublishChunk) -> None:
        upload = self._uploads.find(ask.upload)
        if upload.committing is not None:
            raise Refused(Code.STALE, f"upload {ask.upload} is committed already")
        if len(call.frames) != 1:
            raise Refused(Code.MALFORMED, f"a chunk is one frame; {len(call.frames)} came")
        end, nbytes = ask.offset + call.frames[0].nbytes, upload.about.manifest.nbytes
        if ask.offset < 0 or end > nbytes:
            raise Refused(Code.MALFORMED, f"bytes {ask.offset} to {end} are not in a version of {nbytes} bytes")
        self._versions.write(upload.staged, ask.offset, call.frames[0])
        call.reply(Done())

    async def _commit(self, number: int) -> Registered:
        """The outcome of an upload, however often it is asked for."""
        upload = self._uploads.find(number)
        if upload.committing is None:
            upload.committing = self._tasks.start(_settled(self._publish(upload)))
        outcome = await asyncio.shield(upload.committing)
        self._uploads.forget_finished()
        if isinstance(outcome, Refused):
            if outcome.code is Code.BUSY:
                upload.committing = None
            raise outcome
        return outcome

    async def _publish(self, upload: Upload) -> Registered:
        about = upload.about
        async with self._catalog.publishing:
            if self._catalog.lacks(about):
                await self._catalog.keep(upload.staged)
            else:
                self._versions.discard(upload.staged)
            return await self._catalog.register(about)

    # Pulling ---------------------------------------------------------------------------------------------------------

    async def _manifest(self, worker: str, key: VersionKey, stored: Stored) -> ManifestOf:
        await self._catalog.verified(worker, key, stored)
        return ManifestOf(manifest=stored.about.manifest, path=str(stored.path.resolve()), host=boot_id())

    def _later_chunk(self, call: Call, ask: GetChunk) -> None:
        """One piece, at most ``chunk_bytes`` of what was asked."""
        stored = self._catalog.find(VersionKey(ask.lineage, ask.version))
        size = stored.about.manifest.nbytes
        if ask.nbytes < 1 or not 0 <= ask.offset < size:
            raise Refused(Code.MALFORMED, f"{ask.nbytes} bytes at {ask.offset} are not in a version of {size} bytes")

        async def answering() -> None:
            nbytes = min(ask.nbytes, self._chunk_bytes)
            try:
                data = await asyncio.to_thread(self._versions.read, stored, ask.offset, nbytes)
            except FileNotFoundError:  # nobody pinned it, and it went meanwhile
                data = b""
            if data:
                call.reply(Chunk(offset=ask.offset), [data])
            else:
                call.refuse(Code.BAD_VERSION, f"{stored.path.name} is gone, or ends before byte {ask.offset}")

        self._tasks.start(answering())

    async def work(self) -> None:
        """Settle what the folder held at the start; then delete what nobody needs, again and again."""
        await self._catalog.recover()
        while True:
            await asyncio.sleep(COLLECT_EVERY_S)
            await self._catalog.collect()


async def _settled(publishing: Coroutine[Any, Any, Registered]) -> Registered | Refused:
    """The result or the refusal, as a value: a refused publish is no failure of this process."""
    try:
        return await publishing
    except Refused as no:
        return no


def _refuse(call: Call, no: Refused) -> None:
    call.refuse(no.code, no.detail, retry_after_ms=BUSY_MS if no.code is Code.BUSY else 0)
