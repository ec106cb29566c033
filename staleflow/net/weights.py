"""Fetch the bytes of a version over a connection into existing memory: whole, or as changes to an older version.

- A few chunks are in flight at once (credit), so the link is busy while both ends work. Memory beyond the target is
  bounded by those chunks, which are as large as the link carries in a moment.
- Nothing is verified here: callers compare tensors with the manifest (``is_right``) before they use or forward them.
- A pace limits the bytes requested per second, on links that others use as well.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from staleflow.net.adaptive_chunks import AdaptiveChunk, Stuck
from staleflow.net.client import Client
from staleflow.net.errors import Refused, Unavailable
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.wire.codec import ProtocolError
from staleflow.protocols.wire.delta import WIDTHS, Span, apply
from staleflow.protocols.wire.manifest import digest
from staleflow.protocols.wire.messages import Chunk, GetChunk, GetDelta, GetManifest, Ping, Pong, Request, TensorEntry

CHUNK_BYTES = 4 << 20
"""Maximum size of one message. A server may send less than was requested."""
SPAN_BYTES = 4 << 20
"""Maximum part of a version in one delta."""
DELTA_MAX_BYTES_PER_S = 800e6
"""Bytes per second of a link below which a delta is tried: computing a delta takes a core more than a second per GB."""
CREDIT = 4
"""Chunks in flight at once."""

PING_TIMEOUT_S = 5.0
"""A relay that does not answer a ping for this long is gone."""
STALL_TIMEOUT_S = 300.0
"""Time in which a source must deliver ``MIN_BYTES``; one that answers pings but delivers less is broken. Longer than a
large tensor takes to reach a relay on a slow link, which delivers nothing of a tensor before all of it is verified."""
MIN_BYTES = 1 << 20
STALLED_COOLDOWN_S = 3600.0
"""Time for which a reader avoids a relay that has stalled."""
UNREACHABLE_COOLDOWN_S = 60.0
"""Time for which a reader avoids a relay that did not answer."""

T = TypeVar("T")
Arrived = Callable[[int, int], None]
"""Called with offset and size of bytes that are in place."""
Applied = Callable[[GetDelta, memoryview], None]
"""Called with a span that is in place, and its delta."""
Load = Callable[[int, int], None]
"""Called in a thread with offset and size of base bytes to load into place. May raise ``Refused``."""


class Stalled(Unavailable):
    """A source answers, but delivers almost nothing."""

    def __init__(self, address: str, waited_s: float, nbytes: int) -> None:
        super().__init__(address, waited_s)
        self.args = (f"{address} answers, but delivered {nbytes} bytes in {waited_s:.0f} s",)


class ByteCounter:
    """Counter of the received bytes of a version; called with each part that is in place."""

    def __init__(self) -> None:
        self.nbytes = 0

    def __call__(self, offset: int, nbytes: int) -> None:
        self.nbytes += nbytes


class SourceCooldowns:
    """Addresses that are avoided for a while. Belongs to one loop."""

    def __init__(self) -> None:
        self._until_s: dict[str, float] = {}

    def add(self, address: str, why: Unavailable) -> None:
        """Avoid ``address`` for ``STALLED_COOLDOWN_S`` if it stalled, else for ``UNREACHABLE_COOLDOWN_S``."""
        for_s = STALLED_COOLDOWN_S if isinstance(why, Stalled) else UNREACHABLE_COOLDOWN_S
        self._until_s[address] = asyncio.get_running_loop().time() + for_s

    def __contains__(self, address: object) -> bool:
        now = asyncio.get_running_loop().time()
        self._until_s = {other: until for other, until in self._until_s.items() if until > now}
        return address in self._until_s


class Pace:
    """Rate limit of ``bytes_per_s``, on the mean of a second; 0 is unlimited."""

    def __init__(self, bytes_per_s: float = 0.0) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_s = 0.0

    async def take(self, nbytes: int) -> None:
        """Wait until ``nbytes`` may be requested."""
        if not self._bytes_per_s:
            return
        now = asyncio.get_running_loop().time()
        start = max(self._free_s, now)
        self._free_s = start + nbytes / self._bytes_per_s
        await asyncio.sleep(start - now)


class DeltaChoice:
    """Choice between whole versions and deltas: whichever was faster when last used."""

    def __init__(self, *, deltas: bool) -> None:
        self._deltas = deltas
        self._whole_rate = 0.0
        self._delta_rate = 0.0
        """Bytes of a version per second; 0 before the first."""

    @property
    def delta_pays(self) -> bool:
        if not self._deltas or not self._whole_rate:
            return False
        return self._delta_rate > self._whole_rate if self._delta_rate else self._whole_rate < DELTA_MAX_BYTES_PER_S

    def whole_took(self, nbytes: int, seconds: float) -> None:
        """Record a transfer of a whole version."""
        self._whole_rate = nbytes / max(seconds, 1e-6)

    def delta_took(self, nbytes: int, seconds: float) -> None:
        """Record a transfer of a version of ``nbytes`` as a delta."""
        self._delta_rate = nbytes / max(seconds, 1e-6)


class ChunkSizes:
    """Adaptive request sizes of one source, kept across versions."""

    def __init__(self) -> None:
        self.whole = AdaptiveChunk(CHUNK_BYTES)
        self.changes = AdaptiveChunk(SPAN_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A parameter server or a relay to fetch from."""

    client: Client
    pace: Pace
    chunk_sizes: ChunkSizes


async def whole(
    source: Source, asked: GetManifest, parts: Iterable[tuple[int, int]], target: memoryview, arrived: Arrived
) -> None:
    """Fill parts (offset, bytes) of ``target`` with bytes of the version. Raise ``Refused``, ``Unavailable`` or
    ``ProtocolError``."""
    pieces = _pieces(parts, source.chunk_sizes.whole)
    await credited(_fill(source, asked, start, target[start : start + size], arrived) for start, size in pieces)


def _pieces(parts: Iterable[tuple[int, int]], portion: AdaptiveChunk) -> Iterator[tuple[int, int]]:
    """Yield the parts in chunks, each of the size that is right when it is requested."""
    for offset, nbytes in parts:
        start, end = offset, offset + nbytes
        while start < end:
            size = min(portion.nbytes, end - start)
            yield start, size
            start += size


async def changes(
    source: Source,
    asked: GetManifest,
    base: GetManifest,
    spans: Sequence[Span],
    target: memoryview,
    applied: Applied,
    load: Load | None = None,
) -> None:
    """Turn ``target``, which holds ``base`` or loads it span by span, into the version. Raises like ``whole``; after an
    error ``target`` holds neither version, unless nothing was applied."""
    await credited(_change(source, asked, base, span, target, applied, load) for span in spans)


async def credited(work: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run all coroutines, ``CREDIT`` at once. The first error cancels the rest."""
    waiting = iter(work)

    async def one_after_another() -> None:
        for step in waiting:
            await step

    try:
        async with asyncio.TaskGroup() as lanes:
            for _ in range(CREDIT):
                lanes.create_task(one_after_another())
    except* (Refused, Unavailable, ProtocolError) as failed:
        first: BaseException = failed
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        error = first
    else:
        return
    raise error


async def while_alive(client: Client, work: Coroutine[Any, Any, T], moved: ByteCounter | None = None) -> T:
    """Return the result of ``work``, whose calls of ``client`` may take long. Raise ``Unavailable`` once the server
    does not even answer a ping, ``Stalled`` when it only answers pings and too little has arrived."""
    working, watching = asyncio.ensure_future(work), asyncio.ensure_future(_watch(client, moved))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            watching.result()
        return await working
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _watch(client: Client, moved: ByteCounter | None) -> None:
    clock = asyncio.get_running_loop().time
    since_s, before = clock(), 0
    while True:
        await client.ask(Ping(), Pong, timeout_s=PING_TIMEOUT_S)
        await asyncio.sleep(PING_TIMEOUT_S / 2)
        if moved is None or moved.nbytes - before >= MIN_BYTES:
            since_s, before = clock(), 0 if moved is None else moved.nbytes
        elif (waited_s := clock() - since_s) > STALL_TIMEOUT_S:
            raise Stalled(client.address, waited_s, moved.nbytes - before)


def is_right(entry: TensorEntry, version: memoryview) -> bool:
    """Return whether a tensor's bytes match the manifest."""
    return digest(version[entry.offset : entry.offset + entry.nbytes]) == entry.digest


async def _fill(source: Source, asked: GetManifest, offset: int, piece: memoryview, arrived: Arrived) -> None:
    portion = source.chunk_sizes.whole
    while piece.nbytes:
        wanted = min(piece.nbytes, portion.nbytes)
        await source.pace.take(wanted)
        ask = GetChunk(lineage=asked.lineage, version=asked.version, offset=offset, nbytes=wanted)
        try:
            frame = await portion.carry(source.client, _frame(source, ask), wanted)
        except Stuck:
            continue
        size = frame.nbytes
        if not 0 < size <= wanted:
            raise _malformed(source, ask)
        piece[:size] = frame
        arrived(offset, size)
        piece, offset = piece[size:], offset + size


async def _change(
    source: Source,
    asked: GetManifest,
    base: GetManifest,
    span: Span,
    target: memoryview,
    applied: Applied,
    load: Load | None,
) -> None:
    while span.nbytes:
        portion = source.chunk_sizes.changes.nbytes
        part = span._replace(nbytes=min(span.nbytes, portion - portion % max(WIDTHS)))
        try:
            await _change_part(source, asked, base, part, target, applied, load)
        except Stuck:
            continue
        span = span._replace(offset=span.offset + part.nbytes, nbytes=span.nbytes - part.nbytes)


async def _change_part(
    source: Source,
    asked: GetManifest,
    base: GetManifest,
    span: Span,
    target: memoryview,
    applied: Applied,
    load: Load | None,
) -> None:
    ask = GetDelta(
        lineage=asked.lineage,
        version=asked.version,
        base_lineage=base.lineage,
        base_version=base.version,
        offset=span.offset,
        nbytes=span.nbytes,
        width=span.width,
    )
    frame = await source.chunk_sizes.changes.carry(source.client, _frame(source, ask), span.nbytes)
    await source.pace.take(frame.nbytes)  # the size is known only now, so the following requests wait for it

    def put() -> None:
        if load is not None:
            load(span.offset, span.nbytes)
        apply(frame, target[span.offset : span.offset + span.nbytes])

    applying = asyncio.ensure_future(asyncio.to_thread(put))
    try:
        await asyncio.shield(applying)
    except asyncio.CancelledError:
        with suppress(ProtocolError, Refused):
            await applying  # the thread still writes: the canceller may reuse the target only after it
            applied(ask, frame)
        raise
    applied(ask, frame)


async def _frame(source: Source, ask: Request) -> memoryview:
    reply, frames = await source.client.call(ask, timeout_s=None)
    if not isinstance(reply, Chunk) or len(frames) != 1:
        raise _malformed(source, ask)
    return frames[0]


def _malformed(source: Source, ask: Request) -> ProtocolError:
    detail = f"{source.client.address} answered {type(ask).__name__} without a chunk of that size"
    return ProtocolError(Code.MALFORMED, detail)
