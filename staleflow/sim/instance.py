"""One life of the shipped rollout worker in a simulated run, on a simulated event loop, engine and peers."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from staleflow.clients.rollout.worker import Worker
from staleflow.clients.weights import PulledVersion, Puller
from staleflow.net.client import Client
from staleflow.net.memory_transport import MemoryClient, MemoryEndpoint
from staleflow.protocols.consistency.ids import Lineage, Version, WorkerId
from staleflow.protocols.wire.messages import Attach, AttachReply
from staleflow.protocols.wire.tensors import Array
from staleflow.sim.asking import sha_of
from staleflow.sim.async_engine import SimAsyncEngine
from staleflow.sim.book import SimRecipe
from staleflow.sim.engine import SimEngine
from staleflow.sim.virtual import Conductor

PROMPT = np.ones(1, np.int32)
"""Token ids of every prompt. The cost of a prompt is known to the samples of its groups instead."""


class SimPuller(Puller):
    """Versions without bytes, which take ``pull_s`` seconds to arrive."""

    def __init__(self, pull_s: float) -> None:
        self._pull_s = pull_s

    async def pull(self, lineage: Lineage, version: Version) -> PulledVersion:
        await asyncio.sleep(self._pull_s)
        return SimVersion(lineage, version)

    def close(self) -> None:
        """Do nothing: no connection is open."""


class SimVersion(PulledVersion):
    """A version without bytes."""

    def __init__(self, lineage: Lineage, version: Version) -> None:
        self.sha = sha_of(lineage, version)
        self.mapped, self.direct = True, False

    def arrays(self) -> dict[str, Array]:
        return {}

    async def close(self) -> None:
        """Do nothing: no resource is held."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peers:
    """The servers of all workers of a run, and the pause to load weights."""

    scheduler: MemoryEndpoint
    shards: Sequence[MemoryEndpoint]
    recipe: SimRecipe
    load_s: float
    report_s: float
    failed: Callable[[BaseException], None]
    """Called with the error that ended a worker."""


class SimInstance:
    """One life of one worker, which starts at once."""

    def __init__(
        self, worker: WorkerId, name: str, engine: SimEngine, conductor: Conductor, peers: Peers, *, pull_s: float
    ) -> None:
        self.worker = worker
        self.name = name
        self.engine = engine
        self.began_s = conductor.now_s
        self.ended_s = float("inf")
        self._conductor = conductor
        self._peers = peers
        self._pull_s = pull_s
        self._why = ""
        """Reason of leaving; empty while it works."""
        self._process = conductor.spawn(worker, self._main)
        self._process.on_end.append(self._on_end)

    async def _main(self) -> None:
        peers, recipe = self._peers, self._peers.recipe
        scheduler = MemoryClient(peers.scheduler, worker=self.worker)
        shards: list[Client] = [MemoryClient(shard, worker=self.worker) for shard in peers.shards]
        capacity = recipe.capacity(self.engine.slots)
        request = Attach(worker=self.worker, name=self.name, role="rollout", capacity=capacity)
        await scheduler.ask(request, AttachReply)
        longest = recipe.sampling.max_new_tokens
        engine = SimAsyncEngine(self.engine, recipe.book, load_s=peers.load_s, longest=longest)
        puller = SimPuller(self._pull_s)
        worker = Worker(self.worker, scheduler, shards, puller, engine, _encode, recipe, report_s=peers.report_s)
        why = "failed"
        try:
            await worker.run()
            why = "drained"
        finally:
            await worker.leave(self._why or why)

    def _on_end(self) -> None:
        if self._process.error is not None:
            self._peers.failed(self._process.error)

    def on_end(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` when its process ends."""
        self._process.on_end.append(callback)

    def leave(self) -> None:
        """Detach; the worker's work in progress is released."""
        self._why = "leaves"
        self.stop()
        if self._process.main is not None:
            self._process.main.cancel()

    def crash(self) -> None:
        """End without any message."""
        self.stop()
        self._conductor.kill(self._process)

    def stop(self) -> None:
        """Stop the engine; the worker itself may still leave."""
        self.ended_s = self._conductor.now_s
        self.engine.stop()

    def hang(self) -> None:
        """Hang the engine; its worker has to notice by itself."""
        self.engine.hang()

    def resume(self) -> None:
        """Let a hung engine continue."""
        self.engine.resume()


def _encode(prompt: str) -> NDArray[np.int32]:
    return PROMPT
