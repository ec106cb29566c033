"""Relays of a run, added one by one, and their readers."""

import asyncio
import subprocess
import sys
from typing import Any

import numpy as np

from staleflow.clients.weights import Puller
from staleflow.net.client import Client
from staleflow.process.daemon import Stop
from staleflow.protocols.consistency.ids import Lineage, Version, WorkerId
from staleflow.protocols.wire.messages import GetChunk, GetManifest
from staleflow.protocols.wire.tensors import Array
from staleflow.servers.parameters.relay.main import serve_until
from tests.servers.running import Run, eventually

Weights = dict[str, Array]
RELAY_HOST = "the relays' host"
FAR = "a host without a relay"

LARGE: Weights = {
    "first": np.random.default_rng(0).random((300, 100), dtype=np.float32),
    "scale": np.asarray(1.5, np.float32),
    "empty": np.zeros((0, 4), np.float32),
    "last": np.random.default_rng(1).integers(0, 2**16, 300_001, dtype=np.uint16),
}


class Grown:
    """A run and its relays."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.stops: dict[str, tuple[Stop, asyncio.Task[None]]] = {}

    async def grow(self, name: str, *, mb_per_s: float = 0.0) -> None:
        """Add a relay; it is in the tree when this returns."""
        stop, where = Stop(), self.run.where.scheduler
        serving = serve_until(stop, self.run.config, self.run.run_dir, name, where, mb_per_s=mb_per_s)
        self.stops[name] = stop, asyncio.ensure_future(serving)
        await eventually(lambda: self.is_there(name))

    async def is_there(self, name: str) -> bool:
        return any(str(known["relay"]).startswith(name) for known in await self.tree())

    async def is_another(self, name: str, worker: str) -> bool:
        """Return True once the dead relay is forgotten and another relay has its name."""
        there = [str(known["relay"]) for known in await self.tree()]
        return len(there) == 1 and there[0].startswith(name) and there[0] != worker

    def process(self, name: str) -> "subprocess.Popen[bytes]":
        command = (sys.executable, "-m", "staleflow.cli", "attach", "relay", "--run-dir", str(self.run.run_dir))
        return subprocess.Popen((*command, "--name", name), stderr=subprocess.DEVNULL)

    async def tree(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = (await self.run.status(self.run.where.parameters))["relays"]
        return found

    async def endpoint(self, name: str) -> str:
        return next(str(known["endpoint"]) for known in await self.tree() if str(known["relay"]).startswith(name))

    async def end(self, name: str) -> None:
        stop, serving = self.stops.pop(name)
        stop.set("test")
        await serving

    def reader(self, name: str = "reader.1") -> Puller:
        puller = Puller(self.run.where.parameters, worker=WorkerId(name))
        self.run.clients.append(puller)
        return puller

    async def client(self, name: str) -> Client:
        """Return a client of a relay."""
        return self.run.client(await self.endpoint(name), WorkerId("reader.9"))


def manifest_of(version: int, *, host: str = "") -> GetManifest:
    return GetManifest(worker=WorkerId("reader.9"), lineage=Lineage(0), version=Version(version), host=host)


def chunk(offset: int, nbytes: int) -> GetChunk:
    return GetChunk(lineage=Lineage(0), version=Version(0), offset=offset, nbytes=nbytes)


async def pulled(puller: Puller, version: int = 0) -> tuple[Weights, bool]:
    async with await puller.pull(Lineage(0), Version(version)) as found:
        return {name: array.copy() for name, array in found.arrays().items()}, found.mapped


def same(found: Weights, wanted: Weights = LARGE) -> None:
    assert list(found) == list(wanted)
    for name, array in wanted.items():
        assert (found[name].tobytes(), found[name].shape) == (array.tobytes(), array.shape)
