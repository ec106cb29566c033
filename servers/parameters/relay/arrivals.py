"""Versions arriving at a relay, which serves each of their tensors as soon as it is verified.

- A version is fetched once, however many readers want it. The manifest of the parameter server decides which bytes are
  right, whichever source they come from: the parent relay first, the parameter server if that fails or has other bytes.
- Verified tensors are kept: after a source has failed, only the others are requested again.
- A relay that cannot get a version rejects it with ``BAD_VERSION`` and never with ``BUSY``, so that its readers go to
  the parameter server themselves.
- If an older version is here and the connection is slow, a delta is fetched instead of whole tensors.
"""

import asyncio
import fcntl
import logging
import mmap
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from staleflow.configs.errors import ConfigError
from staleflow.net import weights
from staleflow.net.errors import Refused, Unavailable
from staleflow.net.weights import ByteCounter, Load, Source, changes, credited, is_right, while_alive, whole
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.consistency.ids import TrainerTerm
from staleflow.protocols.wire import delta
from staleflow.protocols.wire.codec import Data, ProtocolError
from staleflow.protocols.wire.messages import GetDelta, GetManifest, Manifest
from staleflow.servers.parameters.deltas import KEPT_BYTES, Deltas
from staleflow.servers.parameters.pins import Pins
from staleflow.servers.parameters.relay.sources import Upstream
from staleflow.servers.parameters.versions import (
    About,
    NoRoom,
    Staged,
    Stored,
    Unwritable,
    VersionKey,
    Versions,
)
from staleflow.store.disk_errors import Scarce

log = logging.getLogger(__name__)

COPY_BYTES = 4 << 20
MAX_ARRIVING = 1024
"""Maximum number of versions arriving at once. Requests for others get ``BUSY``."""


class Arrival:
    """Bytes of one arriving version, verified tensor by tensor. Owned by one event loop."""

    def __init__(self, manifest: Manifest, staged: Staged, memory: memoryview) -> None:
        self.manifest = manifest
        self.staged = staged
        self.memory = memory
        self._starts = [entry.offset for entry in manifest.tensors]
        self._ends = [entry.offset + entry.nbytes for entry in manifest.tensors]
        self._missing = [entry.nbytes for entry in manifest.tensors]
        self._right = [False] * len(manifest.tensors)
        self._changed = asyncio.Event()
        """Set, and replaced by a new event, when a tensor is verified and when the arrival fails."""
        self._failed: Refused | None = None
        self.moved = ByteCounter()
        """Progress in bytes received, right or wrong."""
        self.received_deltas: dict[GetDelta, bytes] = {}
        """Deltas received for it, ``KEPT_BYTES`` at most. A delta is right if all tensors that it touches are."""
        self._checking: set[asyncio.Task[None]] = set()

    async def servable(self, offset: int, nbytes: int) -> int:
        """Wait until at least one byte at ``offset`` is verified; return how many may be served, up to an unverified
        tensor.

        Raise ``Refused`` if the arrival has failed.
        """
        touched = self._touched(offset, nbytes)
        while touched and not self._right[touched[0]]:
            if self._failed is not None:
                raise self._failed
            await self._changed.wait()
        ahead = next((index for index in touched if not self._right[index]), None)
        return nbytes if ahead is None else self._starts[ahead] - offset

    async def verified(self, offset: int, nbytes: int) -> memoryview:
        """Return these bytes once all of them are verified. Raise ``Refused`` if the arrival has failed."""
        at, end = offset, offset + nbytes
        while at < end:
            at += await self.servable(at, end - at)
        return self.memory[offset:end]

    def arrived(self, offset: int, nbytes: int) -> None:
        """Note that these bytes are in memory. Each byte arrives once between two calls of ``missing_parts``."""
        self.moved(offset, nbytes)
        for index in self._touched(offset, nbytes):
            inside = min(offset + nbytes, self._ends[index]) - max(offset, self._starts[index])
            self._missing[index] -= inside
            if inside and not self._missing[index]:
                self._check_later(index)

    def copied(self, index: int) -> None:
        """Note that a tensor was copied from an older version."""
        self._missing[index] = 0
        self._check_later(index)

    async def settled(self) -> bool:
        """Wait for the checks in progress; return True if all tensors are verified."""
        while self._checking:
            await asyncio.wait(set(self._checking))
        for index, entry in enumerate(self.manifest.tensors):
            self._right[index] |= not entry.nbytes
        self._notify()
        return all(self._right)

    @property
    def any_right(self) -> bool:
        """Return True if readers may already be reading some of the memory."""
        return any(right and entry.nbytes for right, entry in zip(self._right, self.manifest.tensors, strict=True))

    def missing_parts(self) -> list[tuple[int, int]]:
        """Reset the unverified tensors and return them as parts (offset, nbytes) to request."""
        self.received_deltas.clear()  # some of them were wrong, and it is unknown which
        wanted: list[tuple[int, int]] = []
        for index, entry in enumerate(self.manifest.tensors):
            if not self._right[index]:
                self._missing[index] = entry.nbytes
                wanted.append((entry.offset, entry.nbytes))
        return list(_merged(wanted))

    def fail(self, why: Refused) -> None:
        """Fail the arrival and wake all waiting readers."""
        self._failed = why
        self._notify()

    def _touched(self, offset: int, nbytes: int) -> range:
        return range(bisect_right(self._ends, offset), bisect_left(self._starts, offset + nbytes))

    def _check_later(self, index: int) -> None:
        task = asyncio.ensure_future(self._check(index))
        self._checking.add(task)
        task.add_done_callback(self._checking.discard)

    async def _check(self, index: int) -> None:
        entry = self.manifest.tensors[index]
        if await asyncio.to_thread(is_right, entry, self.memory):
            self._right[index] = True
            self._notify()
        else:
            log.error("tensor %s arrived damaged and is not served", entry.name)

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def _merged(parts: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Merge neighbouring parts, alignment gaps included: a small tensor must not cost a message of its own."""
    start, end = -1, -1
    for offset, nbytes in parts:
        if start < 0 or offset - end >= 64:
            if start >= 0:
                yield start, end - start
            start = offset
        end = offset + nbytes
    if start >= 0:
        yield start, end - start


class Arrivals:
    """Versions of a relay, stored or arriving. ``start`` runs a task that must not fail."""

    def __init__(
        self,
        versions: Versions,
        deltas: Deltas,
        upstream: Upstream,
        pins: Pins,
        start: Callable[[Coroutine[Any, Any, None]], object],
        *,
        keep_versions: int,
    ) -> None:
        self._versions = versions
        self._deltas = deltas
        self._upstream = upstream
        self._pins = pins
        self._start = start
        self._keep_versions = keep_versions
        self._arriving: dict[VersionKey, asyncio.Future[Arrival]] = {}
        self._complete: dict[VersionKey, asyncio.Future[Stored]] = {}

    def __len__(self) -> int:
        return len(self._complete)

    async def manifest(self, key: VersionKey) -> Manifest:
        """Return the manifest of a version, stored or arriving. Raise ``Refused`` as the parameter server does."""
        if (stored := self._versions.stored.get(key)) is not None:
            return stored.about.manifest
        return (await self._arrival(key)).manifest

    async def stored(self, key: VersionKey) -> Stored:
        """Return the version as a file, once it is complete."""
        if (stored := self._versions.stored.get(key)) is not None:
            return stored
        await self._arrival(key)
        if (stored := self._versions.stored.get(key)) is not None:
            return stored
        return await asyncio.shield(self._complete[key])

    async def read(self, key: VersionKey, offset: int, nbytes: int) -> Data:
        """Return some bytes, fewer at the end, once they are verified. Nothing modifies them after that.

        Raise ``Refused`` or ``FileNotFoundError``.
        """
        if (stored := self._versions.stored.get(key)) is None:
            arrival = await self._arrival(key)
            size = arrival.manifest.nbytes
            nbytes = await arrival.servable(offset, min(nbytes, size - offset))
            return arrival.memory[offset : offset + nbytes]
        return await asyncio.to_thread(self._versions.read, stored, offset, nbytes)

    async def span(self, ask: GetDelta) -> Stored | memoryview:
        """Return the stored version, or the new bytes of a span once they are verified. Raise ``Refused``."""
        key = VersionKey(ask.lineage, ask.version)
        if (stored := self._versions.stored.get(key)) is not None:
            return stored
        arrival = await self._arrival(key)
        new = await arrival.verified(ask.offset, ask.nbytes)
        if (frame := arrival.received_deltas.get(ask)) is not None:
            self._deltas.keep(ask, frame)  # readers with the same base get the same delta
        return new

    def is_arriving(self, key: VersionKey) -> bool:
        """Return True while the version is arriving."""
        return key in self._complete

    # Fetching --------------------------------------------------------------------------------------------------------

    async def _arrival(self, key: VersionKey) -> Arrival:
        if (arriving := self._arriving.get(key)) is None:
            if len(self._arriving) >= MAX_ARRIVING:
                raise Refused(Code.BUSY, f"{len(self._arriving)} versions are already arriving at this relay")
            loop = asyncio.get_running_loop()
            arriving = self._arriving[key] = loop.create_future()
            self._complete[key] = loop.create_future()
            self._start(self._fetch(key))
        return await asyncio.shield(arriving)

    async def _fetch(self, key: VersionKey) -> None:
        arriving, complete = self._arriving[key], self._complete[key]
        try:
            arrival = await self._begin(key)
            arriving.set_result(arrival)
            complete.set_result(await self._fill(key, arrival))
        except Refused as refusal:
            for future in (arriving, complete):
                if not future.done():
                    future.set_exception(refusal)
                future.exception()  # retrieved, because every waiter may have been cancelled
        finally:
            del self._arriving[key], self._complete[key]
        await self.collect()  # now, so that the next version can recycle the file of the oldest

    async def _begin(self, key: VersionKey) -> Arrival:
        manifest = await self._upstream.manifest(key)
        staged = None
        try:
            staged = await self._stage(key, manifest.nbytes)
            return Arrival(manifest, staged, _mapped(staged.path, manifest.nbytes))
        except (NoRoom, OSError) as error:
            if staged is not None:
                self._versions.discard(staged)
            await self._upstream.release(key)
            raise Refused(Code.BAD_VERSION, f"this relay has no room: {error}") from error

    async def _stage(self, key: VersionKey, nbytes: int) -> Staged:
        """Create a file for a version. Older versions that are at most a base are deleted, oldest first, until it
        fits. Raise ``NoRoom``."""
        while True:
            try:
                return await asyncio.to_thread(self._versions.stage, key, nbytes)
            except NoRoom as error:
                here = sorted(self._versions.stored)
                old = next((old for old in here if old < key and not self._pins.in_use(old)), None)
                if old is None or isinstance(error, Unwritable):
                    raise
                await self._delete(old)

    async def collect(self) -> None:
        """Delete versions that are neither pinned nor among the newest."""
        for key in sorted(self._versions.stored)[: -self._keep_versions]:
            if key in self._versions.stored and not self._pins.of(key):
                await self._delete(key)

    async def _delete(self, key: VersionKey) -> None:
        """Delete a version: it is invisible immediately, its room is free on return."""
        aside = self._versions.put_aside(key, reuse=True)
        log.info("%s deleted", key)
        await asyncio.to_thread(self._versions.remove, aside)

    async def _fill(self, key: VersionKey, arrival: Arrival) -> Stored:
        """Fetch every tensor, from one source after another. Raise ``Refused`` if the last source has failed."""
        why = ""
        try:
            for source in self._upstream.sources():
                if (
                    await arrival.settled()
                ):  # wait: do not overwrite tensors of the previous source that are being checked
                    return await self._keep(key, arrival)
                try:
                    if await self._from(source, key, arrival):
                        return await self._keep(key, arrival)
                    why = f"{source.client.address} sent other bytes than the manifest names"
                except (Refused, Unavailable, ProtocolError, ConfigError) as error:
                    why = str(error)
                    if isinstance(error, Unavailable):
                        self._upstream.cooldowns.add(source.client.address, error)
                log.warning("%s not fetched yet: %s", key, why)
            raise Refused(Code.BAD_VERSION, f"{key} did not reach this relay: {why}")
        except (Refused, asyncio.CancelledError) as error:
            arrival.fail(error if isinstance(error, Refused) else Refused(Code.BAD_VERSION, "this relay is stopping"))
            self._versions.discard(arrival.staged)
            await self._upstream.release(key)
            raise

    async def _from(self, source: Source, key: VersionKey, arrival: Arrival) -> bool:
        """Fetch the missing tensors from one source; return True if all tensors are verified then.

        Only the time that the source takes to reply counts against it.
        """
        asked = await while_alive(source.client, self._upstream.pin(source, key, arrival.manifest))
        clock, ways, nbytes = asyncio.get_running_loop().time, self._upstream.ways, arrival.manifest.nbytes
        fresh = not arrival.any_right  # a delta would overwrite bytes that readers may be reading
        if fresh and ways.delta_pays and (base := self._base(arrival.manifest)) is not None:
            began = clock()
            if await self._by_delta(source, asked, arrival, base):
                ways.delta_took(nbytes, clock() - began)
                return True
            fresh = False
        began = clock()
        transfer = whole(source, asked, arrival.missing_parts(), arrival.memory, arrival.arrived)
        await while_alive(source.client, transfer, arrival.moved)
        if fresh:
            ways.whole_took(nbytes, clock() - began)
        return await arrival.settled()

    async def _by_delta(self, source: Source, asked: GetManifest, arrival: Arrival, base: Stored) -> bool:
        """Apply a delta over the bytes of ``base``; return True if all tensors are verified then.

        The base is copied span by span as the delta arrives. So the first tensors are verified before the last ones
        arrive, and a source that lacks the base costs little.
        """
        key = base.about.key
        base_request = GetManifest(worker=asked.worker, lineage=key.lineage, version=key.version)
        spans = delta.spans(base.about.manifest, arrival.manifest, most_bytes=weights.SPAN_BYTES)
        room = KEPT_BYTES

        def applied(ask: GetDelta, frame: memoryview) -> None:
            nonlocal room
            room -= frame.nbytes
            if room >= 0:  # keep the first ones: the next reader starts with these spans
                arrival.received_deltas[ask] = bytes(frame)
            arrival.arrived(ask.offset, ask.nbytes)

        try:
            arrival.missing_parts()
            load = partial(_copy, self._versions, base, arrival.memory)
            transfer = changes(source, asked, base_request, spans, arrival.memory, applied, load)
            await credited((while_alive(source.client, transfer, arrival.moved), _copy_equal(arrival, base, load)))
        except (Refused, ProtocolError) as error:
            log.warning("version %d is fetched whole, not as a delta: %s", asked.version, error)
        if not await arrival.settled():
            return False
        for ask, frame in arrival.received_deltas.items():
            self._deltas.keep(ask, frame)  # readers with the same base get the same delta
        return True

    def _base(self, manifest: Manifest) -> Stored | None:
        """Return the newest stored version that a delta can be applied to."""
        fitting = [s for s in self._versions.stored.values() if delta.comparable(s.about.manifest, manifest)]
        return max(fitting, key=lambda stored: stored.about.key, default=None)

    async def _keep(self, key: VersionKey, arrival: Arrival) -> Stored:
        about = About(
            lineage=key.lineage,
            version=key.version,
            trainer_term=TrainerTerm(0),
            batch=None,
            manifest=arrival.manifest,
        )
        try:
            stored = await asyncio.to_thread(self._versions.keep, arrival.staged, about, in_place=True)
        except (NoRoom, Scarce) as error:
            raise Refused(Code.BAD_VERSION, f"this relay has no room: {error}") from error
        self._versions.stored[key] = stored
        log.info("%s stored, %d bytes, sha %s", key, about.manifest.nbytes, about.manifest.sha[:12])
        await self._upstream.mark_stored(key)
        return stored


def _mapped(path: Path, nbytes: int) -> memoryview:
    if not nbytes:
        return memoryview(b"")
    with path.open("r+b") as file:
        with suppress(OSError):  # without lock support, no file is recycled either
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # the map keeps the lock while any view of it exists
        return memoryview(mmap.mmap(file.fileno(), nbytes))


async def _uncancelled(work: Coroutine[Any, Any, None]) -> None:
    """Wait for work in a thread, even if cancelled: until it ends, the thread writes into the memory."""
    working = asyncio.ensure_future(work)
    try:
        await asyncio.shield(working)
    except asyncio.CancelledError:
        await asyncio.wait((working,))
        raise


async def _copy_equal(arrival: Arrival, base: Stored, load: Load) -> None:
    """Copy the unchanged tensors from an older version."""
    for index, (was, entry) in enumerate(zip(base.about.manifest.tensors, arrival.manifest.tensors, strict=True)):
        if was.digest == entry.digest and entry.nbytes:
            await _uncancelled(asyncio.to_thread(load, entry.offset, entry.nbytes))
            arrival.copied(index)


def _copy(versions: Versions, base: Stored, memory: memoryview, offset: int, nbytes: int) -> None:
    """Copy bytes of ``base`` to the same place. Raise ``Refused`` if they cannot be read."""
    try:
        for start in range(offset, offset + nbytes, COPY_BYTES):
            piece = versions.read(base, start, min(COPY_BYTES, offset + nbytes - start))
            memory[start : start + len(piece)] = piece
    except OSError as error:
        raise Refused(Code.BAD_VERSION, f"{base.about.key} was deleted: {error}") from error
