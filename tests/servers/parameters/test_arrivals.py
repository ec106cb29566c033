"""What a relay does with the memory of a version while threads are still at work on it: nothing."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.consistency.ids import Lineage, TrainerTerm, Version, WorkerId
from staleflow.protocols.wire.codec import Data
from staleflow.protocols.wire.manifest import digest, lay_out
from staleflow.protocols.wire.messages import (
    Chunk,
    Done,
    GetChunk,
    GetDelta,
    GetManifest,
    Manifest,
    ManifestOf,
    Ping,
    Reply,
    Request,
)
from staleflow.runtime.client import Client
from staleflow.runtime.errors import Refused, Unavailable
from staleflow.runtime.transport import SOCKETS
from staleflow.runtime.weights import is_right
from staleflow.servers.parameters import relay_arrivals
from staleflow.servers.parameters.deltas import Deltas
from staleflow.servers.parameters.relay_arrivals import Arrivals
from staleflow.servers.parameters.relay_sources import Upstream
from staleflow.servers.parameters.versions import About, VersionKey, Versions

BASE, NEXT = VersionKey(Lineage(0), Version(0)), VersionKey(Lineage(0), Version(1))
DATA = {key: np.full(1_000, 7 + key.version, np.int32).tobytes() for key in (BASE, NEXT)}
WORKER = WorkerId("relay-0.1")
TURNS = 200
"""Of the loop: many more than lie between the end of one source and the first question to the next."""


def manifest_of(key: VersionKey) -> Manifest:
    return lay_out([("layer", "int32", (1_000,), digest(DATA[key]))])


class Above(Client):
    """Gives ``data`` as the next version, without a network, and is gone once ``gone`` is set."""

    def __init__(self, address: str, data: bytes) -> None:
        super().__init__(address, worker=WORKER)
        self.data = data
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
                return ManifestOf(manifest=manifest_of(NEXT), path="", host=""), []
            case GetChunk(offset=offset, nbytes=nbytes):
                self.asked.append(body)
                return Chunk(offset=offset), [memoryview(self.data)[offset : offset + nbytes]]
            case GetDelta():
                raise Refused(Code.BAD_VERSION, "no delta")
            case _:
                return Done(), []


class Relay:
    """Version 0 is here. ``first`` is asked for the next one, then ``root``."""

    def __init__(self, folder: Path, tasks: asyncio.TaskGroup, *, first: bytes, root: bytes) -> None:
        versions = Versions(folder, durability="process")
        staged = versions.stage(BASE, len(DATA[BASE]))
        versions.write(staged, 0, DATA[BASE])
        about = About(
            lineage=BASE.lineage,
            version=BASE.version,
            trainer_term=TrainerTerm(0),
            batch=None,
            manifest=manifest_of(BASE),
        )
        versions.stored[BASE] = versions.keep(staged, about)
        self.first, self.root = Above("tcp://127.0.0.1:1", first), Above("tcp://127.0.0.1:2", root)
        self.upstream = Upstream(WORKER, bytes_per_s=0.0, deltas=True, transport=SOCKETS)
        self.upstream._above = self.first  # pyright: ignore[reportPrivateUsage]
        self.upstream._root.set_result(self.root)  # pyright: ignore[reportPrivateUsage]

        def start(work: Coroutine[Any, Any, None]) -> object:
            return tasks.create_task(work)

        self.arrivals = Arrivals(versions, Deltas(versions, "compressed"), self.upstream, start)


class Thread:
    """Keeps the first call of a function in its thread, once it has begun, until ``go``."""

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
    copy = Thread(relay_arrivals._copy, works_first=False)  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(relay_arrivals, "_copy", copy)
    async with asyncio.TaskGroup() as tasks:
        relay = Relay(tmp_path, tasks, first=DATA[NEXT], root=DATA[NEXT])
        relay.upstream.ways.whole_took(1, 1.0)  # a slow link: a delta is tried
        coming = tasks.create_task(relay.arrivals.stored(NEXT))
        await copy.begun.wait()
        relay.upstream.ways.whole_took(1 << 40, 1.0)  # the next source is asked for all of it
        relay.first.gone.set()
        for _ in range(TURNS):
            await asyncio.sleep(0)
        asked_meanwhile = list(relay.root.asked)
        copy.go()
        stored = await coming
    assert asked_meanwhile == []
    assert relay.root.asked != []
    assert stored.path.read_bytes() == DATA[NEXT]


async def test_the_next_source_writes_over_nothing_that_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the last one gave turns out right when it is gone; what the next one gives is damaged."""
    look = Thread(is_right, works_first=True)
    monkeypatch.setattr(relay_arrivals, "is_right", look)
    async with asyncio.TaskGroup() as tasks:
        relay = Relay(tmp_path, tasks, first=DATA[NEXT], root=bytes(len(DATA[NEXT])))
        coming = tasks.create_task(relay.arrivals.stored(NEXT))
        await look.begun.wait()
        relay.first.gone.set()
        for _ in range(TURNS):
            await asyncio.sleep(0)
        look.go()
        stored = await coming
    assert stored.path.read_bytes() == DATA[NEXT]
    assert relay.root.asked == []
