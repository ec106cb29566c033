"""Bytes of a version over a connection, into memory that is there already: whole, or as changes to an older version.

- A few pieces are under way at once (credit), so that a link is busy while each end works; memory beyond the target is
  those pieces. They are as large as the link can carry in a moment.
- Nothing here is believed: who lets a piece or a version go on compares it with the manifest (``is_right``).
- A pace bounds how many bytes a second are asked for, on links that others use as well.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from staleflow.net.adaptive_chunks import Portion, Stuck
from staleflow.net.client import Client
from staleflow.net.errors import Refused, Unavailable
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.wire.codec import ProtocolError
from staleflow.protocols.wire.delta import WIDTHS, Span, apply
from staleflow.protocols.wire.manifest import digest
from staleflow.protocols.wire.messages import Chunk, GetChunk, GetDelta, GetManifest, Ping, Pong, Request, TensorEntry

CHUNK_BYTES = 4 << 20
"""Of one message, at most. A server may send less at once than it is asked for."""
SPAN_BYTES = 4 << 20
"""Of a version, in one delta, at most."""
PAYS_BELOW = 800e6
"""Bytes a second of a link below which a delta is tried: making one takes a core more than a second a GB."""
CREDIT = 4
"""Pieces under way at once."""

SILENT_S = 5.0
"""Without an answer to a ping: a relay is gone."""
STALLED_S = 300.0
"""In which a source must have given ``MIN_BYTES``: one that answers pings and does no more than that is broken.
Longer than a large tensor takes to a relay on a slow link, which gives nothing of it before all of it is right."""
MIN_BYTES = 1 << 20
SHUNNED_S = 3600.0
"""For which a relay that has stalled is not asked again by who waited for it."""
AWAY_S = 60.0
"""The same for one that did not answer."""

T = TypeVar("T")
Arrived = Callable[[int, int], None]
"""Called with offset and number of the bytes that are in their place."""
Applied = Callable[[GetDelta, memoryview], None]
"""Called with a span that is in its place, and the delta that brought it there."""
Load = Callable[[int, int], None]
"""Called in a thread with offset and number of bytes of the base that are to be put in their place. ``Refused``."""


class Stalled(Unavailable):
    """A source is there, and gives next to nothing."""

    def __init__(self, address: str, waited_s: float, nbytes: int) -> None:
        super().__init__(address, waited_s)
        self.args = (f"{address} answers, but gave {nbytes} bytes in {waited_s:.0f} s",)


class Moved:
    """How many bytes of a version have come so far; called with each that is in its place."""

    def __init__(self) -> None:
        self.nbytes = 0

    def __call__(self, offset: int, nbytes: int) -> None:
        self.nbytes += nbytes


class Shunned:
    """Addresses that are left alone for a while. Belongs to one loop."""

    def __init__(self) -> None:
        self._until_s: dict[str, float] = {}

    def add(self, address: str, why: Unavailable) -> None:
        """Nobody asks it for ``SHUNNED_S`` if it has stalled, else for ``AWAY_S``."""
        for_s = SHUNNED_S if isinstance(why, Stalled) else AWAY_S
        self._until_s[address] = asyncio.get_running_loop().time() + for_s

    def __contains__(self, address: object) -> bool:
        now = asyncio.get_running_loop().time()
        self._until_s = {known: until for known, until in self._until_s.items() if until > now}
        return address in self._until_s


class Pace:
    """At most ``bytes_per_s``, on the mean of a second; 0: as fast as it goes."""

    def __init__(self, bytes_per_s: float = 0.0) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_s = 0.0

    async def take(self, nbytes: int) -> None:
        """Wait until so many bytes may be asked for."""
        if not self._bytes_per_s:
            return
        now = asyncio.get_running_loop().time()
        start = max(self._free_s, now)
        self._free_s = start + nbytes / self._bytes_per_s
        await asyncio.sleep(start - now)


class Ways:
    """Whether the next version should come whole or as a delta: what was faster when it was last done."""

    def __init__(self, *, deltas: bool) -> None:
        self._deltas = deltas
        self._whole_rate = 0.0
        self._delta_rate = 0.0
        """Bytes of a version a second; 0 before the first."""

    @property
    def delta_pays(self) -> bool:
        if not self._deltas or not self._whole_rate:
            return False
        return self._delta_rate > self._whole_rate if self._delta_rate else self._whole_rate < PAYS_BELOW

    def whole_took(self, nbytes: int, seconds: float) -> None:
        """A version came whole."""
        self._whole_rate = nbytes / max(seconds, 1e-6)

    def delta_took(self, nbytes: int, seconds: float) -> None:
        """A version of so many bytes came as a delta."""
        self._delta_rate = nbytes / max(seconds, 1e-6)


class Portions:
    """How much of a version is asked for at once: learned from the versions before."""

    def __init__(self) -> None:
        self.whole = Portion(CHUNK_BYTES)
        self.changes = Portion(SPAN_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where bytes come from: a parameter server, or a relay."""

    client: Client
    pace: Pace
    portions: Portions


async def whole(
    source: Source, asked: GetManifest, parts: Iterable[tuple[int, int]], target: memoryview, arrived: Arrived
) -> None:
    """Fill parts (offset, bytes) of ``target`` with bytes of the version. ``Refused``, ``Unavailable`` or
    ``ProtocolError``."""
    pieces = _pieces(parts, source.portions.whole)
    await credited(_fill(source, asked, start, target[start : start + size], arrived) for start, size in pieces)


def _pieces(parts: Iterable[tuple[int, int]], portion: Portion) -> Iterator[tuple[int, int]]:
    """The parts in pieces, each as large as is right when it is taken."""
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
    """Turn ``target``, which holds ``base``, or has it loaded span by span, into the version. As ``whole``; after an
    error it is neither, unless nothing was applied."""
    await credited(_change(source, asked, base, span, target, applied, load) for span in spans)


async def credited(work: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run all of it, ``CREDIT`` at once. The first error ends the rest."""
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


async def while_alive(client: Client, work: Coroutine[Any, Any, T], moved: Moved | None = None) -> T:
    """The result of ``work``, which asks ``client`` for things that may take long. ``Unavailable`` once the server does
    not even answer a ping, ``Stalled`` when it does no more than that and too little has ``moved``."""
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


async def _watch(client: Client, moved: Moved | None) -> None:
    clock = asyncio.get_running_loop().time
    since_s, before = clock(), 0
    while True:
        await client.ask(Ping(), Pong, timeout_s=SILENT_S)
        await asyncio.sleep(SILENT_S / 2)
        if moved is None or moved.nbytes - before >= MIN_BYTES:
            since_s, before = clock(), 0 if moved is None else moved.nbytes
        elif (waited_s := clock() - since_s) > STALLED_S:
            raise Stalled(client.address, waited_s, moved.nbytes - before)


def is_right(entry: TensorEntry, version: memoryview) -> bool:
    """Whether a tensor's bytes are those that the manifest names."""
    return digest(version[entry.offset : entry.offset + entry.nbytes]) == entry.digest


async def _fill(source: Source, asked: GetManifest, offset: int, piece: memoryview, arrived: Arrived) -> None:
    portion = source.portions.whole
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
        portion = source.portions.changes.nbytes
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
    frame = await source.portions.changes.carry(source.client, _frame(source, ask), span.nbytes)
    await source.pace.take(frame.nbytes)  # known only now: the next ones wait for it

    def put() -> None:
        if load is not None:
            load(span.offset, span.nbytes)
        apply(frame, target[span.offset : span.offset + span.nbytes])

    applying = asyncio.ensure_future(asyncio.to_thread(put))
    try:
        await asyncio.shield(applying)
    except asyncio.CancelledError:
        with suppress(ProtocolError, Refused):
            await applying  # what gave up waiting may use the target again
            applied(ask, frame)
        raise
    applied(ask, frame)


async def _frame(source: Source, ask: Request) -> memoryview:
    reply, frames = await source.client.call(ask, timeout_s=None)
    if not isinstance(reply, Chunk) or len(frames) != 1:
        raise _malformed(source, ask)
    return frames[0]


def _malformed(source: Source, ask: Request) -> ProtocolError:
    detail = f"{source.client.address} answered {type(ask).__name__} with no piece of that size"
    return ProtocolError(Code.MALFORMED, detail)
