"""Versions on their way into a relay, which serves each tensor of them as soon as that is known to be right.

- Asked for once, however many want it. What the manifest of the parameter server names is what is wanted, whoever the
  bytes come from: the relay above first, the parameter server itself when that is gone or its bytes are others.
- What is right stays: after a source has failed only the other tensors are asked for again.
- A relay that cannot get a version says no, and never "later": its readers then go to the parameter server themselves.
- Where an older version is here and the link is slow, what changed since then comes instead of whole tensors.
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
    Scarce,
    Staged,
    Stored,
    Unwritable,
    VersionKey,
    Versions,
)

log = logging.getLogger(__name__)

COPY_BYTES = 4 << 20
MAX_COMING = 1024
"""Versions on their way at once, whatever is asked for; readers of others are told to come back."""


class Arrival:
    """The bytes of one version, some of them right already. Belongs to one loop."""

    def __init__(self, manifest: Manifest, staged: Staged, memory: memoryview) -> None:
        self.manifest = manifest
        self.staged = staged
        self.memory = memory
        self._starts = [entry.offset for entry in manifest.tensors]
        self._ends = [entry.offset + entry.nbytes for entry in manifest.tensors]
        self._missing = [entry.nbytes for entry in manifest.tensors]
        self._right = [False] * len(manifest.tensors)
        self._changed = asyncio.Event()
        """Set, and made anew, when a tensor is right, and when nothing more will come."""
        self._failed: Refused | None = None
        self.moved = ByteCounter()
        """All bytes that came, right or not."""
        self.came: dict[GetDelta, bytes] = {}
        """Deltas that came for it, ``KEPT_BYTES`` at most; each is right once the tensors are that it touches."""
        self._checking: set[asyncio.Task[None]] = set()

    async def given(self, offset: int, nbytes: int) -> int:
        """How many bytes from there on may be given, at least one, once there are some: up to a tensor that is not
        right yet. ``Refused`` when there never will be."""
        touched = self._touched(offset, nbytes)
        while touched and not self._right[touched[0]]:
            if self._failed is not None:
                raise self._failed
            await self._changed.wait()
        ahead = next((index for index in touched if not self._right[index]), None)
        return nbytes if ahead is None else self._starts[ahead] - offset

    async def right(self, offset: int, nbytes: int) -> memoryview:
        """These bytes, once all of them may be given. ``Refused`` as ``given``."""
        at, end = offset, offset + nbytes
        while at < end:
            at += await self.given(at, end - at)
        return self.memory[offset:end]

    def arrived(self, offset: int, nbytes: int) -> None:
        """These bytes are in memory; each comes once between two calls of ``begin_again``."""
        self.moved(offset, nbytes)
        for index in self._touched(offset, nbytes):
            inside = min(offset + nbytes, self._ends[index]) - max(offset, self._starts[index])
            self._missing[index] -= inside
            if inside and not self._missing[index]:
                self._check_later(index)

    def copied(self, index: int) -> None:
        """A tensor is in memory that a version here has, too."""
        self._missing[index] = 0
        self._check_later(index)

    async def settled(self) -> bool:
        """Whether all tensors are right, once those that are in memory have been looked at."""
        while self._checking:
            await asyncio.wait(set(self._checking))
        for index, entry in enumerate(self.manifest.tensors):
            self._right[index] |= not entry.nbytes
        self._tell()
        return all(self._right)

    @property
    def any_right(self) -> bool:
        """Whether some of the memory may be read by others."""
        return any(right and entry.nbytes for right, entry in zip(self._right, self.manifest.tensors, strict=True))

    def begin_again(self) -> list[tuple[int, int]]:
        """What is not right, as parts (offset, bytes) to ask for."""
        self.came.clear()  # what was wrong with them is not known
        wanted: list[tuple[int, int]] = []
        for index, entry in enumerate(self.manifest.tensors):
            if not self._right[index]:
                self._missing[index] = entry.nbytes
                wanted.append((entry.offset, entry.nbytes))
        return list(_joined(wanted))

    def fail(self, why: Refused) -> None:
        """Nothing more will come."""
        self._failed = why
        self._tell()

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
            self._tell()
        else:
            log.error("tensor %s came damaged; it is not served", entry.name)

    def _tell(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def _joined(parts: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Neighbours as one part, gaps between tensors included: a small tensor costs no message of its own."""
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
    """All versions of a relay, here or coming. ``start`` runs a task that must not fail."""

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
        self._coming: dict[VersionKey, asyncio.Future[Arrival]] = {}
        self._whole: dict[VersionKey, asyncio.Future[Stored]] = {}

    def __len__(self) -> int:
        return len(self._whole)

    async def manifest(self, key: VersionKey) -> Manifest:
        """What is in a version that is here or comes. ``Refused`` as the parameter server refuses it."""
        if (stored := self._versions.stored.get(key)) is not None:
            return stored.about.manifest
        return (await self._arrival(key)).manifest

    async def stored(self, key: VersionKey) -> Stored:
        """The version as a file, once it is whole."""
        if (stored := self._versions.stored.get(key)) is not None:
            return stored
        await self._arrival(key)
        if (stored := self._versions.stored.get(key)) is not None:
            return stored
        return await asyncio.shield(self._whole[key])

    async def read(self, key: VersionKey, offset: int, nbytes: int) -> Data:
        """Some bytes, fewer at the end, once they are known to be right: nobody changes them any more. ``Refused``,
        ``FileNotFoundError``."""
        if (stored := self._versions.stored.get(key)) is None:
            arrival = await self._arrival(key)
            size = arrival.manifest.nbytes
            nbytes = await arrival.given(offset, min(nbytes, size - offset))
            return arrival.memory[offset : offset + nbytes]
        return await asyncio.to_thread(self._versions.read, stored, offset, nbytes)

    async def span(self, ask: GetDelta) -> Stored | memoryview:
        """Where the new bytes of a span are, once they are known to be right. ``Refused``."""
        key = VersionKey(ask.lineage, ask.version)
        if (stored := self._versions.stored.get(key)) is not None:
            return stored
        arrival = await self._arrival(key)
        new = await arrival.right(ask.offset, ask.nbytes)
        if (frame := arrival.came.get(ask)) is not None:
            self._deltas.keep(ask, frame)  # a reader with the same base gets the same
        return new

    def coming(self, key: VersionKey) -> bool:
        """Whether it is on its way this moment."""
        return key in self._whole

    # Bringing --------------------------------------------------------------------------------------------------------

    async def _arrival(self, key: VersionKey) -> Arrival:
        if (coming := self._coming.get(key)) is None:
            if len(self._coming) >= MAX_COMING:
                raise Refused(Code.BUSY, f"{len(self._coming)} versions are on their way to this relay")
            loop = asyncio.get_running_loop()
            coming = self._coming[key] = loop.create_future()
            self._whole[key] = loop.create_future()
            self._start(self._bring(key))
        return await asyncio.shield(coming)

    async def _bring(self, key: VersionKey) -> None:
        coming, whole_ = self._coming[key], self._whole[key]
        try:
            arrival = await self._begin(key)
            coming.set_result(arrival)
            whole_.set_result(await self._fill(key, arrival))
        except Refused as no:
            for future in (coming, whole_):
                if not future.done():
                    future.set_exception(no)
                future.exception()  # told to whoever waits; nobody may
        finally:
            del self._coming[key], self._whole[key]
        await self.collect()  # now: the next version is written over the file of the oldest

    async def _begin(self, key: VersionKey) -> Arrival:
        manifest = await self._upstream.manifest(key)
        staged = None
        try:
            staged = await self._stage(key, manifest.nbytes)
            return Arrival(manifest, staged, _mapped(staged.path, manifest.nbytes))
        except (NoRoom, OSError) as error:
            if staged is not None:
                self._versions.discard(staged)
            await self._upstream.let_go(key)
            raise Refused(Code.BAD_VERSION, f"this relay has no room: {error}") from error

    async def _stage(self, key: VersionKey, nbytes: int) -> Staged:
        """A file to write the version into. Until there is room for it, older versions go that are at most somebody's
        base, the oldest first. ``NoRoom``."""
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
        """Delete what is neither pinned nor new."""
        for key in sorted(self._versions.stored)[: -self._keep_versions]:
            if key in self._versions.stored and not self._pins.of(key):
                await self._delete(key)

    async def _delete(self, key: VersionKey) -> None:
        """It is forgotten at once; its room is there when this returns."""
        aside = self._versions.put_aside(key, reuse=True)
        log.info("%s is deleted", key)
        await asyncio.to_thread(self._versions.remove, aside)

    async def _fill(self, key: VersionKey, arrival: Arrival) -> Stored:
        """Bring every tensor, from one source after another. ``Refused`` when the last of them has failed."""
        why = ""
        try:
            for source in self._upstream.sources():
                if await arrival.settled():  # nothing is written over what the source before gave and is looked at
                    return await self._keep(key, arrival)
                try:
                    if await self._from(source, key, arrival):
                        return await self._keep(key, arrival)
                    why = f"{source.client.address} sent other bytes than the manifest names"
                except (Refused, Unavailable, ProtocolError, ConfigError) as error:
                    why = str(error)
                    if isinstance(error, Unavailable):
                        self._upstream.cooldowns.add(source.client.address, error)
                log.warning("%s is not here yet: %s", key, why)
            raise Refused(Code.BAD_VERSION, f"{key} did not reach this relay: {why}")
        except (Refused, asyncio.CancelledError) as error:
            arrival.fail(error if isinstance(error, Refused) else Refused(Code.BAD_VERSION, "this relay is leaving"))
            self._versions.discard(arrival.staged)
            await self._upstream.let_go(key)
            raise

    async def _from(self, source: Source, key: VersionKey, arrival: Arrival) -> bool:
        """Whether all tensors are right after this source. Only what it has to answer is its time."""
        asked = await while_alive(source.client, self._upstream.pin(source, key, arrival.manifest))
        clock, ways, nbytes = asyncio.get_running_loop().time, self._upstream.ways, arrival.manifest.nbytes
        fresh = not arrival.any_right  # bytes that others read already are not written over
        if fresh and ways.delta_pays and (base := self._base(arrival.manifest)) is not None:
            began = clock()
            if await self._by_delta(source, asked, arrival, base):
                ways.delta_took(nbytes, clock() - began)
                return True
            fresh = False
        began = clock()
        coming = whole(source, asked, arrival.begin_again(), arrival.memory, arrival.arrived)
        await while_alive(source.client, coming, arrival.moved)
        if fresh:
            ways.whole_took(nbytes, clock() - began)
        return await arrival.settled()

    async def _by_delta(self, source: Source, asked: GetManifest, arrival: Arrival, base: Stored) -> bool:
        """Whether all tensors are right after what changed since ``base`` was put over its bytes. Those are copied span
        by span, as the changes come: a tensor is right before the others, a source without the base costs little."""
        key = base.about.key
        held = GetManifest(worker=asked.worker, lineage=key.lineage, version=key.version)
        spans = delta.spans(base.about.manifest, arrival.manifest, most_bytes=weights.SPAN_BYTES)
        room = KEPT_BYTES

        def applied(ask: GetDelta, frame: memoryview) -> None:
            nonlocal room
            room -= frame.nbytes
            if room >= 0:  # the first ones: who asks next begins with these
                arrival.came[ask] = bytes(frame)
            arrival.arrived(ask.offset, ask.nbytes)

        try:
            arrival.begin_again()
            load = partial(_copy, self._versions, base, arrival.memory)
            coming = changes(source, asked, held, spans, arrival.memory, applied, load)
            await credited((while_alive(source.client, coming, arrival.moved), _copy_equal(arrival, base, load)))
        except (Refused, ProtocolError) as error:
            log.warning("version %d comes whole, not as a delta: %s", asked.version, error)
        if not await arrival.settled():
            return False
        for ask, frame in arrival.came.items():
            self._deltas.keep(ask, frame)  # readers with the same base get the same
        return True

    def _base(self, manifest: Manifest) -> Stored | None:
        """The newest version here that a delta can be put over."""
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
        log.info("%s is here, %d bytes, sha %s", key, about.manifest.nbytes, about.manifest.sha[:12])
        await self._upstream.has(key)
        return stored


def _mapped(path: Path, nbytes: int) -> memoryview:
    if not nbytes:
        return memoryview(b"")
    with path.open("r+b") as file:
        with suppress(OSError):  # where there are no locks no file is used again either
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # held by the map, too, while somebody has a part of that
        return memoryview(mmap.mmap(file.fileno(), nbytes))


async def _to_its_end(work: Coroutine[Any, Any, None]) -> None:
    """A thread's work. Who gives up waiting for it waits all the same: until then the thread writes."""
    working = asyncio.ensure_future(work)
    try:
        await asyncio.shield(working)
    except asyncio.CancelledError:
        await asyncio.wait((working,))
        raise


async def _copy_equal(arrival: Arrival, base: Stored, load: Load) -> None:
    """The tensors that did not change, from the version that is here."""
    for index, (was, entry) in enumerate(zip(base.about.manifest.tensors, arrival.manifest.tensors, strict=True)):
        if was.digest == entry.digest and entry.nbytes:
            await _to_its_end(asyncio.to_thread(load, entry.offset, entry.nbytes))
            arrival.copied(index)


def _copy(versions: Versions, base: Stored, memory: memoryview, offset: int, nbytes: int) -> None:
    """The same bytes of ``base``. ``Refused`` where they cannot be read."""
    try:
        for start in range(offset, offset + nbytes, COPY_BYTES):
            piece = versions.read(base, start, min(COPY_BYTES, offset + nbytes - start))
            memory[start : start + len(piece)] = piece
    except OSError as error:
        raise Refused(Code.BAD_VERSION, f"{base.about.key} is no longer here: {error}") from error
