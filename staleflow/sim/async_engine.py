"""The simulated engine behind the interface of the shipped rollout worker: requests in, trajectories of numbered tokens
out."""

import asyncio
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from staleflow.clients.rollout.engines.base import EngineStats, Request, RequestError, TokenSegment, Trajectory
from staleflow.protocols.consistency.ids import Lineage, Version
from staleflow.protocols.wire.trajectory import Finish
from staleflow.sim.book import Book
from staleflow.sim.engine import EngineFull, SimEngine
from staleflow.sim.sample import Sample

REFUSAL_DELAY_S = 1.0
"""Delay from a refused request to its error. Without it an engine that refuses every request would reserve and release
groups endlessly at one instant of virtual time."""


class SimAsyncEngine:
    """An ``AsyncEngine`` over a ``SimEngine``. Create it inside a running event loop."""

    def __init__(self, engine: SimEngine, book: Book, *, load_s: float, longest: int) -> None:
        """``longest`` is ``max_new_tokens`` of the run."""
        self._loop = asyncio.get_running_loop()
        self.failure: asyncio.Future[None] = self._loop.create_future()
        self._engine = engine
        self._book = book
        self._load_s = load_s
        self._longest = longest
        self._logprobs = np.zeros(longest, np.float32)
        self._samples: dict[int, Sample] = {}
        """Samples by request."""
        self._ended: dict[Sample, asyncio.Future[None]] = {}
        engine.on_end = self._on_end

    async def generate(self, request: Request) -> Trajectory:
        sample = self._book.submitted(request.seed, self._engine)
        try:
            self._engine.submit(sample)
        except EngineFull as error:
            await asyncio.sleep(REFUSAL_DELAY_S)
            raise RequestError(str(error)) from error
        self._samples[request.id] = sample
        ended = self._ended[sample] = self._loop.create_future()
        try:
            await ended
        finally:
            del self._samples[request.id]
            if self._ended.pop(sample, None) is not None:  # cancelled: the engine still has the sample
                self._engine.abort(sample)
        return self._trajectory(request, sample)

    def _on_end(self, sample: Sample) -> None:
        if (ended := self._ended.get(sample)) is not None and not ended.done():
            del self._ended[sample]
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
        if (sample := self._samples.get(request)) is not None:
            if least:
                self._engine.interrupt(sample)
            else:
                self._engine.withdraw(sample)

    def abort(self, request: int) -> None:
        if (sample := self._samples.get(request)) is not None:
            self._ended[sample].cancel()

    async def load(self, tensors: Mapping[str, NDArray[np.generic]], lineage: Lineage, version: Version) -> None:
        loaded: asyncio.Future[None] = self._loop.create_future()
        self._engine.load(lineage, version, self._load_s, lambda: None if loaded.done() else loaded.set_result(None))
        await loaded

    def stats(self) -> EngineStats:
        engine, state = self._engine, self._engine.state()
        return EngineStats(
            running=state.running,
            waiting=state.waiting,
            kv_used=state.kv_tokens / engine.kv_capacity if engine.kv_capacity else 0.0,
            kv_tokens=state.kv_tokens,
            kv_capacity=engine.kv_capacity,
            slots=engine.slots,
            generated_tokens=state.generated,
            steps=state.steps,
            preemptions=state.preempted,
        )

    def busy_s(self) -> float:
        return self._engine.state().busy_s

    def tokens_per_s(self) -> float:
        """Return the exact current rate of the simulated engine."""
        state = self._engine.state()
        return self._engine.cost.tokens_per_s(state.running, state.kv_tokens) if state.running else 0.0

    def stuck_s(self) -> float:
        return self._engine.hung_s()

    async def close(self) -> None:
        """Do nothing: no resource is held."""
