"""An engine in virtual time, without threads: it writes tokens derived from the seed of each request, and checks its
input.

It is the ``AsyncEngine`` of the shipped rollout worker. Only timers run between the start and the end of a sample, so a
sample costs two events of the loop however long it is.
"""

import asyncio
import random
from collections import deque
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from staleflow.clients.rollout.engines.base import (
    EngineStats,
    Request,
    RequestError,
    TokenSegment,
    Trajectory,
    VersionMarks,
    check_request,
)
from staleflow.protocols.consistency.ids import Lineage, Version
from staleflow.protocols.wire.trajectory import Finish
from staleflow.sim.faults.payload import VOCABULARY, are_weights, manifest_of, tokens_of
from staleflow.sim.faults.scene import Scene

TOKEN_S = 0.005
"""Time per token of a fast engine."""
LOAD_S = 0.02
CONTEXT = 1 << 16


class _Sample:
    """One request in the engine."""

    __slots__ = ("before", "cut", "ended", "length", "limit", "marks", "pace_s", "request", "since_s", "timer")

    def __init__(self, request: Request, length: int, pace_s: float, ended: "asyncio.Future[Trajectory]") -> None:
        self.request = request
        self.before = sum(len(segment.token_ids) for segment in request.prefix)
        self.length = self.limit = max(length, self.before + 1)
        self.pace_s = pace_s
        self.ended = ended
        self.cut = False
        self.since_s = 0.0
        self.timer: asyncio.TimerHandle | None = None
        self.marks = VersionMarks()

    def count(self, now_s: float) -> int:
        """Return the number of tokens so far."""
        return min(self.before + int((now_s - self.since_s) / self.pace_s), self.limit)


class VirtualEngine:
    """An engine that runs ``slots`` samples at once; further ones wait. Create it inside a running event loop."""

    def __init__(self, scene: Scene, worker: str, *, slots: int) -> None:
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._loop = asyncio.get_running_loop()
        self._scene = scene
        self._worker = worker
        self._slots = slots
        self._token_s = TOKEN_S * random.Random(f"{scene.seed} {worker}").choice((1.0, 1.0, 3.0))
        if scene.config.coordination.migration != "none":  # groups migrate to engines where fewer samples wait
            self._slots = max(scene.started, slots // random.Random(f"{worker} {scene.seed}").choice((1, 4)))
        self._loaded = (Lineage(0), Version(-1))
        self._running: dict[int, _Sample] = {}
        self._waiting: deque[_Sample] = deque()
        self._generated = 0

    async def generate(self, request: Request) -> Trajectory:
        check_request(request, self._scene.contexts.get(self._worker, CONTEXT), VOCABULARY)
        if self._worker in self._scene.broken:
            self._scene.counts["a broken engine refused a request"] += 1
            raise RequestError("this engine is broken")
        self._check_prefix(request)
        draws = random.Random(request.seed)
        length = 1 + min(int(draws.lognormvariate(2.0, 1.0)), request.sampling.max_new_tokens - 1)
        sample = _Sample(request, length, self._token_s * (1 + draws.random()), self._loop.create_future())
        self._waiting.append(sample)
        self._fill()
        try:
            return await sample.ended
        finally:
            self._leave(sample)

    def interrupt(self, request: int, least: int = 1) -> None:
        if (sample := self._running.get(request)) is not None:
            sample.limit = min(sample.limit, sample.count(self._loop.time()) + 1)
            self._end_at_limit(sample)
            return
        for sample in self._waiting:
            if sample.request.id == request:
                sample.cut = True
                if not least:
                    self._ends(sample, sample.request.prefix)
                return

    def abort(self, request: int) -> None:
        for sample in (*self._running.values(), *self._waiting):
            if sample.request.id == request:
                sample.ended.cancel()

    async def load(self, tensors: Mapping[str, NDArray[np.generic]], lineage: Lineage, version: Version) -> None:
        # Copied at once: a byte of a mapped file that changes after its verification cannot be detected.
        data, journal = b"".join(tensor.tobytes() for tensor in tensors.values()), self._scene.journal
        await asyncio.sleep(LOAD_S)
        journal.checked["rollout: weights"] += 1
        whole = are_weights(self._scene.seed, data)
        if not whole or manifest_of(data).sha not in journal.published.get((lineage, version), ()):
            journal.mismatches.append(f"{self._worker} got weights that are not ({lineage}, {version})")
        self._loaded, now_s = (lineage, version), self._loop.time()
        for sample in self._running.values():
            sample.marks.turn(lineage, version, sample.count(now_s))

    def stats(self) -> EngineStats:
        return EngineStats(
            running=len(self._running),
            waiting=len(self._waiting),
            slots=self._slots,
            generated_tokens=self._generated,
        )

    def busy_s(self) -> float:
        return 0.0

    def tokens_per_s(self) -> float:
        return len(self._running) / self._token_s

    def stuck_s(self) -> float:
        return 0.0

    async def close(self) -> None:
        """Do nothing: no resource is held."""

    # --- samples -------------------------------------------------------------------------------------------------

    def _check_prefix(self, request: Request) -> None:
        """Compare the tokens of another instance in a prefix with the tokens that their seed determines."""
        start = 0
        for segment in request.prefix:
            end = start + len(segment.token_ids)
            ids, logprobs = tokens_of(request.seed, segment.lineage, segment.version, start, end)
            self._scene.journal.checked["rollout: partials"] += 1
            if not (np.array_equal(ids, segment.token_ids) and np.array_equal(logprobs, segment.logprobs)):
                self._scene.journal.mismatches.append(f"{self._worker} got tokens of a sample that no engine wrote")
            start = end

    def _fill(self) -> None:
        while self._waiting and len(self._running) < self._slots:
            sample = self._waiting.popleft()
            if sample.ended.done():
                continue
            self._running[sample.request.id] = sample
            sample.since_s = self._loop.time()
            start = 0
            for segment in sample.request.prefix:
                sample.marks.turn(segment.lineage, segment.version, start)
                start += len(segment.token_ids)
            sample.marks.turn(*self._loaded, start)
            if sample.cut:
                sample.limit = start + 1
            self._end_at_limit(sample)

    def _end_at_limit(self, sample: _Sample) -> None:
        if sample.timer is not None:
            sample.timer.cancel()
        due_s = sample.since_s + (sample.limit - sample.before) * sample.pace_s
        sample.timer = self._loop.call_at(due_s, self._end, sample)

    def _end(self, sample: _Sample) -> None:
        self._generated += sample.limit - sample.before
        marks = sample.marks.marks
        ends = [start for _, _, start in marks[1:]] + [sample.limit]
        segments: list[TokenSegment] = []
        for (lineage, version, start), end in zip(marks, ends, strict=True):
            if end > start:
                ids, logprobs = tokens_of(sample.request.seed, lineage, version, start, end)
                segments.append(TokenSegment(lineage=lineage, version=version, token_ids=ids, logprobs=logprobs))
        self._ends(sample, tuple(segments))

    def _ends(self, sample: _Sample, segments: tuple[TokenSegment, ...]) -> None:
        if sample.ended.done():
            return
        written = sum(len(segment.token_ids) for segment in segments)
        finish = Finish.INTERRUPTED if written < sample.length else Finish.STOP
        if written == sample.request.sampling.max_new_tokens:
            finish = Finish.LENGTH
        sample.ended.set_result(Trajectory(id=sample.request.id, segments=segments, finish=finish))

    def _leave(self, sample: _Sample) -> None:
        if sample.timer is not None:
            sample.timer.cancel()
        if self._running.pop(sample.request.id, None) is None and sample in self._waiting:
            self._waiting.remove(sample)
        self._fill()
