"""The shipped rollout worker in a simulated run: its loop, its engine and its weights are simulated."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from staleflow.clients.parameters import PulledVersion, Puller
from staleflow.clients.rollout.engine import EngineStats, Request, RequestError, TokenSegment, Trajectory
from staleflow.clients.rollout.worker import Worker
from staleflow.protocols.consistency.ids import Lineage, Version, WorkerId
from staleflow.protocols.wire.messages import Attach, Attached
from staleflow.protocols.wire.tensors import Array
from staleflow.protocols.wire.trajectory import Finish
from staleflow.runtime.memory import MemoryClient, MemoryEndpoint
from staleflow.sim.asking import sha_of
from staleflow.sim.book import Book, SimRecipe
from staleflow.sim.engine import EngineFull, SimEngine
from staleflow.sim.faults.virtual import Conductor
from staleflow.sim.sample import Sample

GIVE_UP_S = 1.0
"""From a request that the engine refuses to its error: time must pass, or the next ones would all come at once."""


class SimAsyncEngine:
    """``SimEngine`` as the shipped worker has it. The tokens of a sample are its number in the book."""

    def __init__(self, engine: SimEngine, book: Book, *, load_s: float, longest: int) -> None:
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._loop = asyncio.get_running_loop()
        self._engine = engine
        self._book = book
        self._load_s = load_s
        self._longest = longest
        self._requests: dict[int, Sample] = {}
        self._ended: dict[Sample, asyncio.Future[None]] = {}
        self._logprobs = np.zeros(longest, np.float32)
        engine.on_end = self._on_end

    async def generate(self, request: Request) -> Trajectory:
        sample = self._book.samples[request.seed]
        self._book.group_of[request.seed].engine = self._engine
        try:
            self._engine.submit(sample)
        except EngineFull as error:
            await asyncio.sleep(GIVE_UP_S)
            raise RequestError(str(error)) from error
        self._requests[request.id] = sample
        ended = self._ended[sample] = self._loop.create_future()
        try:
            await ended
        finally:
            if self._ended.pop(sample, None) is not None:
                self._engine.abort(sample)
            del self._requests[request.id]
        return self._trajectory(request, sample)

    def _on_end(self, sample: Sample) -> None:
        if (ended := self._ended.pop(sample, None)) is not None and not ended.done():
            ended.set_result(None)

    def _trajectory(self, request: Request, sample: Sample) -> Trajectory:
        finish = Finish.INTERRUPTED
        if sample.written == sample.length:
            finish = Finish.LENGTH if sample.length == self._longest else Finish.STOP
        segments = tuple(
            TokenSegment(
                lineage=lineage,
                version=version,
                token_ids=np.full(tokens, sample.id, np.int32),
                logprobs=self._logprobs[:tokens],
            )
            for lineage, version, tokens in sample.segments
        )
        return Trajectory(id=request.id, segments=segments, finish=finish)

    def interrupt(self, request: int, least: int = 1) -> None:
        if (sample := self._requests.get(request)) is not None:
            if least:
                self._engine.interrupt(sample)
            else:
                self._engine.withdraw(sample)

    def abort(self, request: int) -> None:
        if (sample := self._requests.get(request)) is not None:
            self._ended[sample].cancel()

    async def load(self, tensors: Mapping[str, NDArray[np.generic]], lineage: Lineage, version: Version) -> None:
        loaded = self._loop.create_future()
        self._engine.load(lineage, version, self._load_s, lambda: None if loaded.done() else loaded.set_result(None))
        await loaded

    def stats(self) -> EngineStats:
        seen, capacity = self._engine.seen(), self._engine.kv_capacity
        return EngineStats(
            running=seen.running,
            waiting=seen.waiting,
            kv_used=seen.kv_tokens / capacity if capacity else 0.0,
            kv_tokens=seen.kv_tokens,
            kv_capacity=capacity,
            slots=self._engine.slots,
            generated_tokens=seen.generated,
            steps=seen.steps,
            preemptions=seen.preempted,
        )

    def busy_s(self) -> float:
        return self._engine.seen().busy_s

    def tokens_per_s(self) -> float:
        seen = self._engine.seen()
        return self._engine.cost.tokens_per_s(seen.running, seen.kv_tokens) if seen.running else 0.0

    def stuck_s(self) -> float:
        return self._engine.stands_s()

    async def close(self) -> None:
        """Nothing is held."""


class SimPuller(Puller):
    """Versions without bytes, which take a while to arrive."""

    def __init__(self, pull_s: float) -> None:
        self._pull_s = pull_s

    async def pull(self, lineage: Lineage, version: Version) -> PulledVersion:
        await asyncio.sleep(self._pull_s)
        return SimVersion(lineage, version)

    def close(self) -> None:
        """No connection is open."""


class SimVersion(PulledVersion):
    """A version without bytes."""

    mapped = direct = False

    def __init__(self, lineage: Lineage, version: Version) -> None:
        self.sha = sha_of(lineage, version)

    def arrays(self) -> dict[str, Array]:
        return {}

    async def close(self) -> None:
        """Nothing is held."""


class SimInstance:
    """One life of one worker."""

    def __init__(
        self,
        worker: WorkerId,
        name: str,
        engine: SimEngine,
        conductor: Conductor,
        scheduler: MemoryEndpoint,
        shards: Sequence[MemoryEndpoint],
        recipe: SimRecipe,
        *,
        prompt_tokens: int,
        pull_s: float,
        load_s: float,
        report_s: float,
    ) -> None:
        self.worker = worker
        self.name = name
        self.engine = engine
        self.began_s = conductor.now_s
        self.ended_s = float("inf")
        self._conductor = conductor
        self._scheduler = MemoryClient(scheduler, worker=worker)
        self._shards = [MemoryClient(shard, worker=worker) for shard in shards]
        self._recipe = recipe
        self._prompt = np.zeros(prompt_tokens, np.int32)
        self._pull_s, self._load_s, self._report_s = pull_s, load_s, report_s
        self._process = conductor.spawn(worker, self._main)

    async def _main(self) -> None:
        hello = Attach(
            worker=self.worker, name=self.name, role="rollout", capacity=self._recipe.capacity(self.engine.slots)
        )
        await self._scheduler.ask(hello, Attached)
        engine = SimAsyncEngine(
            self.engine, self._recipe.book, load_s=self._load_s, longest=self._recipe.sampling.max_new_tokens
        )
        worker = Worker(
            self.worker,
            self._scheduler,
            [*self._shards],
            SimPuller(self._pull_s),
            engine,
            self._encode,
            self._recipe,
            report_s=self._report_s,
        )
        try:
            await worker.run()
        finally:
            await worker.leave("leaves")

    def _encode(self, prompt: str) -> NDArray[np.int32]:
        return self._prompt

    def leave(self) -> None:
        """Say goodbye; what it works on is given up."""
        self.ended_s = self._conductor.now_s
        self.engine.stop()
        if self._process.main is not None:
            self._process.main.cancel()

    def crash(self) -> None:
        """Gone without a word."""
        self.ended_s = self._conductor.now_s
        self.engine.stop()
        self._conductor.kill(self._process)

    def hang(self) -> None:
        """The engine stands still; the worker notices."""
        self.engine.hang()

    def resume(self) -> None:
        """Go on where it hung."""
        self.engine.resume()
