"""A relay does not touch the memory of a version while threads still work on it."""

# pyright: reportPrivateUsage=false

import asyncio
import errno
import os
import threading
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import pytest

from staleflow.net import weights
from staleflow.net.client import Client
from staleflow.net.errors import Refused, Unavailable
from staleflow.net.transport import SOCKETS
from staleflow.net.weights import is_right
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.consistency.ids import Lineage, TrainerTerm, Version, WorkerId
from staleflow.protocols.wire.codec import Data
from staleflow.protocols.wire.delta import apply, encode
from staleflow.protocols.wire.manifest import digest, lay_out
from staleflow.protocols.wire.messages import (
    Chunk,
    Done,
    GetChunk,
    GetDelta,
    GetManifest,
    Manifest,
    ManifestReply,
    Ping,
    Reply,
    Request,
)
from staleflow.servers.parameters.deltas import Deltas
from staleflow.servers.parameters.pins import Pins
from staleflow.servers.parameters.relay import arrivals as relay_arrivals
from staleflow.servers.parameters.relay.arrivals import Arrivals
from staleflow.servers.parameters.relay.sources import Upstream
from staleflow.servers.parameters.versions import About, VersionKey, Versions
from tests.servers.parameters.crowded import holds

BASE, NEXT = VersionKey(Lineage(0), Version(0)), VersionKey(Lineage(0), Version(1))
HALF = 4032
"""Bytes of each of two adjacent tensors."""
DATA = {key: bytes([7 + key.version]) * 2 * HALF for key in (BASE, NEXT)}
EQUAL = DATA[BASE][:HALF] + DATA[NEXT][HALF:]
"""A next version whose first tensor is unchanged."""
WORKER = WorkerId("relay-0.1")
TURNS = 200
"""Turns of the event loop: many more than pass between the end of one source and the first request to the next."""


def manifest_of(data: bytes) -> Manifest:
    halves = {"first": data[:HALF], "last": data[HALF:]}
    return lay_out([(name, "int32", (HALF // 4,), digest(half)) for name, half in halves.items()])


class Above(Client):
    """Serve ``data`` as the next version without a network until ``gone`` is set; ``wanted`` has the right bytes."""

    def __init__(self, address: str, data: bytes, wanted: bytes) -> None:
        super().__init__(address, worker=WORKER)
        self.data = data
        self.wanted = wanted
        self.most = len(data)
        """Offset at which this source stops serving."""
        self.has_base = False
        self.gone = asyncio.Event()
        self.asked = list[GetChunk]()

    async def call(
        self, body: Request, frames: Sequence[Data] = (), *, timeout_s: float | None = 30.0
    ) -> tuple[Reply, list[memoryview]]:
        match body:
            case Ping():
                await self.gone.wait()
                raise Unavailable(self.address, 0.0)
            case GetManifest():
                return ManifestReply(manifest=manifest_of(self.wanted), path="", host=""), []
            case GetChunk(offset=offset) | GetDelta(offset=offset) if offset >= self.most:
                await asyncio.Event().wait()
                raise AssertionError("nobody sets it")
            case GetChunk(offset=offset, nbytes=nbytes):
                self.asked.append(body)
                return Chunk(offset=offset), [memoryview(self.data)[offset : offset + nbytes]]
            case GetDelta(offset=offset, nbytes=nbytes, width=width) if self.has_base:
                end = offset + nbytes
                return Chunk(offset=offset), [memoryview(encode(DATA[BASE][offset:end], self.data[offset:end], width))]
            case GetDelta():
                raise Refused(Code.BAD_VERSION, "no delta")
            case _:
                return Done(), []


class Relay:
    """A relay that stores version 0 and requests the next one from ``first``, then from ``root``."""

    def __init__(
        self,
        folder: Path,
        tasks: asyncio.TaskGroup,
        *,
        first: bytes,
        root: bytes,
        wanted: bytes = DATA[NEXT],
        keep_versions: int = 2,
    ) -> None:
        versions = Versions(folder, durability="process")
        staged = versions.stage(BASE, len(DATA[BASE]))
        versions.write(staged, 0, DATA[BASE])
        about = About(
            lineage=BASE.lineage,
            version=BASE.version,
            trainer_term=TrainerTerm(0),
            batch=None,
            manifest=manifest_of(DATA[BASE]),
        )
        versions.stored[BASE] = versions.keep(staged, about)
        self.first, self.root = Above("tcp://127.0.0.1:1", first, wanted), Above("tcp://127.0.0.1:2", root, wanted)
        self.upstream = Upstream(WORKER, bytes_per_s=0.0, deltas=True, transport=SOCKETS)
        self.upstream._above = self.first
        self.upstream._root.set_result(self.root)

        def start(work: Coroutine[Any, Any, None]) -> object:
            return tasks.create_task(work)

        self.pins, self.versions, self.deltas = Pins(), versions, Deltas(versions, "compressed")
        self.arrivals = Arrivals(versions, self.deltas, self.upstream, self.pins, start, keep_versions=keep_versions)

    def slow(self) -> None:
        """Make the relay try a delta, which ``first`` has."""
        self.upstream.ways.whole_took(1, 1.0)
        self.first.has_base = True


class Thread:
    """Block the first call of a function in its thread, once it has started, until ``go``."""

    def __init__(self, work: Callable[..., Any], *, works_first: bool) -> None:
        self._work = work
        self._works_first = works_first
        self._loop = asyncio.get_running_loop()
        self._calls = 0
        self._go = threading.Event()
        self.begun = asyncio.Event()

    def __call__(self, *args: Any) -> Any:
        self._calls += 1
        if self._calls > 1:
            return self._work(*args)
        found = self._work(*args) if self._works_first else None
        self._loop.call_soon_threadsafe(self.begun.set)
        assert self._go.wait(60)
        return found if self._works_first else self._work(*args)

    def go(self) -> None:
        self._go.set()


async def test_the_next_source_writes_only_when_the_copy_for_the_last_one_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = Thread(relay_arrivals._copy, works_first=False)
    monkeypatch.setattr(relay_arrivals, "_copy", copy)
    async with asyncio.TaskGroup() as tasks:
        relay = Relay(tmp_path, tasks, first=DATA[NEXT], root=DATA[NEXT])
        relay.slow()
        coming = tasks.create_task(relay.arrivals.stored(NEXT))
        await copy.begun.wait()
        relay.upstream.ways.whole_took(1 << 40, 1.0)  # the relay requests the whole version from the next source
        relay.first.gone.set()
        for _ in range(TURNS):
            await asyncio.sleep(0)
        asked_meanwhile = list(relay.root.asked)
        copy.go()
        stored = await coming
    assert asked_meanwhile == []
    assert relay.root.asked == []  # the bytes of the first source were right
    assert stored.path.read_bytes() == DATA[NEXT]


async def test_the_next_source_writes_over_nothing_that_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last source's bytes prove right after its loss; the next source sends damaged bytes for the same span."""
    monkeypatch.setattr(weights, "CHUNK_BYTES", HALF)
    look = Thread(is_right, works_first=True)
    monkeypatch.setattr(relay_arrivals, "is_right", look)
    async with asyncio.TaskGroup() as tasks:
        relay = Relay(tmp_path, tasks, first=DATA[NEXT], root=bytes(HALF) + DATA[NEXT][HALF:])
        relay.first.most = HALF
        coming = tasks.create_task(relay.arrivals.stored(NEXT))
        await look.begun.wait()
        relay.first.gone.set()
        for _ in range(TURNS):
            await asyncio.sleep(0)
        look.go()
        stored = await coming
    assert stored.path.read_bytes() == DATA[NEXT]
    assert [ask.offset for ask in relay.root.asked] == [HALF]


async def test_the_time_of_a_copy_is_not_that_of_the_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = relay_arrivals._copy
    equal = Thread(load, works_first=True)

    def held(*what: Any) -> None:
        (equal if what[-2] == 0 else load)(*what)

    monkeypatch.setattr(relay_arrivals, "_copy", held)
    async with asyncio.TaskGroup() as tasks:
        relay = Relay(tmp_path, tasks, first=EQUAL, root=EQUAL, wanted=EQUAL)
        relay.slow()
        coming = tasks.create_task(relay.arrivals.stored(NEXT))
        await equal.begun.wait()
        arrival = await relay.arrivals._arrival(NEXT)
        await arrival.verified(HALF, HALF)  # all bytes that the source can serve have arrived
        for _ in range(TURNS):
            await asyncio.sleep(0)
        relay.first.gone.set()
        for _ in range(TURNS):
            await asyncio.sleep(0)
        equal.go()
        stored = await coming
    assert stored.path.read_bytes() == EQUAL
    assert relay.root.asked == []


async def test_nothing_is_copied_for_a_source_without_the_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copied = list[Any]()

    def noted(*what: Any) -> None:
        copied.append(what)

    monkeypatch.setattr(relay_arrivals, "_copy", noted)
    async with asyncio.TaskGroup() as tasks:
        relay = Relay(tmp_path, tasks, first=DATA[NEXT], root=DATA[NEXT])
        relay.slow()
        relay.first.has_base = False
        stored = await relay.arrivals.stored(NEXT)
    assert stored.path.read_bytes() == DATA[NEXT]
    assert relay.first.asked != []
    assert copied == []


@pytest.mark.parametrize("room", [0, 1 << 20])
async def test_deltas_that_came_are_kept_as_far_as_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    monkeypatch.setattr(relay_arrivals, "KEPT_BYTES", room)
    async with asyncio.TaskGroup() as tasks:
        relay = Relay(tmp_path, tasks, first=DATA[NEXT], root=DATA[NEXT])
        relay.slow()
        stored = await relay.arrivals.stored(NEXT)
    assert stored.path.read_bytes() == DATA[NEXT]
    assert relay.first.asked == []
    assert len(relay.deltas._kept) == (1 if room else 0)


async def test_a_span_that_somebody_reads_keeps_its_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "SPAN_BYTES", HALF)
    ask = GetDelta(
        lineage=Lineage(0),
        version=Version(1),
        base_lineage=Lineage(0),
        base_version=Version(0),
        offset=0,
        nbytes=HALF // 2,
        width=4,
    )
    async with asyncio.TaskGroup() as tasks:
        relay = Relay(tmp_path, tasks, first=DATA[NEXT], root=DATA[NEXT])
        relay.slow()
        relay.first.most = HALF
        new = await relay.arrivals.span(ask)
        assert isinstance(new, memoryview)  # the version is incomplete
        made = await relay.deltas.make(ask, relay.versions.stored[BASE], new)
        got = bytearray(DATA[BASE][: HALF // 2])
        apply(made, memoryview(got))
        assert got == DATA[NEXT][: HALF // 2]
        relay.first.gone.set()
        await relay.arrivals.stored(NEXT)
        relay.versions.put_aside(NEXT, reuse=True)
        assert not relay.versions.stage(NEXT, len(DATA[NEXT])).recycled
    assert bytes(new) == DATA[NEXT][: HALF // 2]


async def test_a_piece_on_its_way_to_a_reader_keeps_its_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "CHUNK_BYTES", HALF)
    async with asyncio.TaskGroup() as tasks:
        relay = Relay(tmp_path, tasks, first=DATA[NEXT], root=bytes(HALF) + DATA[NEXT][HALF:])
        relay.first.most = HALF
        piece = await relay.arrivals.read(NEXT, 0, 2 * HALF)
        assert relay.arrivals.is_arriving(NEXT)
        relay.first.gone.set()
        await relay.arrivals.stored(NEXT)
        relay.versions.put_aside(NEXT, reuse=True)
        staged = relay.versions.stage(NEXT, len(DATA[NEXT]))
        relay.versions.write(staged, 0, bytes(len(DATA[NEXT])))
    assert bytes(piece) == DATA[NEXT][:HALF]


@pytest.mark.parametrize("pinned", [True, False])
async def test_the_next_version_is_written_over_the_oldest_unless_a_reader_has_that(
    tmp_path: Path, pinned: bool
) -> None:
    async with asyncio.TaskGroup() as tasks:
        relay = Relay(tmp_path, tasks, first=DATA[NEXT], root=DATA[NEXT], keep_versions=1)
        if pinned:
            relay.pins.add("reader.1", BASE)
        await relay.arrivals.stored(NEXT)
    assert list(relay.versions.stored) == ([BASE, NEXT] if pinned else [NEXT])
    assert relay.versions.stage(NEXT, len(DATA[NEXT])).recycled is not pinned


async def test_where_the_disk_is_full_an_older_version_goes_that_nobody_uses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    holds(monkeypatch, tmp_path, len(DATA[BASE]))
    async with asyncio.TaskGroup() as tasks:
        relay = Relay(tmp_path, tasks, first=DATA[NEXT], root=DATA[NEXT])
        relay.pins.add("reader.1", BASE)
        with pytest.raises(Refused, match=r"this relay has no room: .*No space left on device"):
            await relay.arrivals.stored(NEXT)
        assert list(relay.versions.stored) == [BASE]
        relay.pins.keep_as_base("reader.1", BASE)
        stored = await relay.arrivals.stored(NEXT)
    assert stored.path.read_bytes() == DATA[NEXT]
    assert list(relay.versions.stored) == [NEXT]


async def test_a_relay_without_a_descriptor_says_so_keeps_nothing_and_brings_it_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(*_: object) -> memoryview:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    async with asyncio.TaskGroup() as tasks:
        relay = Relay(tmp_path, tasks, first=DATA[NEXT], root=DATA[NEXT])
        with monkeypatch.context() as patched:
            patched.setattr(relay_arrivals, "_mapped", none_left)
            with pytest.raises(Refused, match="Too many open files"):
                await relay.arrivals.stored(NEXT)
        assert [name for name in os.listdir(tmp_path) if name.endswith(".part")] == []
        stored = await relay.arrivals.stored(NEXT)
    assert stored.path.read_bytes() == DATA[NEXT]
