"""A simulated engine without a model: its steps last as long as the cost model predicts, its tokens are random by seed.

``T(n, kv) = n / (k1 * kv + max(k2, k3 * n) + k4)`` tokens per second, so a step of ``n`` running trajectories that hold
``kv`` tokens lasts ``k1 * kv + max(k2, k3 * n) + k4`` seconds. ``simulated_lengths`` decides the lengths. The weights
are ignored.
"""

import math
import time
import zlib
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from staleflow.clients.rollout.engines.base import EngineStats, Request, RequestError, Trajectory
from staleflow.clients.rollout.engines.queue import RequestQueue
from staleflow.clients.rollout.engines.running_batch import RunningBatch, uniforms
from staleflow.clients.rollout.engines.simulated_lengths import SimulatedLengths
from staleflow.configs.simulation import Simulated
from staleflow.protocols.consistency.ids import Lineage, Version

VOCABULARY = 256
"""Tokens are bytes, so that any reward can read them; 0 ends a trajectory."""
STOP = np.zeros(1, np.int64)


class SimulatedEngine:
    """An ``Engine`` that sleeps. ``now`` and ``sleep`` are its only outside dependencies."""

    def __init__(
        self,
        cost: Simulated,
        *,
        slots: int = 64,
        seed: int = 0,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.joining = True
        self.lineage, self.version = Lineage(0), Version(-1)
        self._cost = cost
        self._lengths = SimulatedLengths(cost, seed)
        self._now, self._sleep = now, sleep
        self._due = 0.0
        self._rows = RunningBatch(slots)
        self._waiting = RequestQueue()
        self._widest = 1
        self._generated = 0
        self._steps = 0

    def submit(self, request: Request) -> None:
        written = sum(len(segment.token_ids) for segment in request.prefix)
        if len(request.prompt_ids) == 0:
            raise RequestError("the prompt is empty")
        if written >= request.sampling.max_new_tokens:
            raise RequestError(f"{written} tokens are written; max_new_tokens is {request.sampling.max_new_tokens}")
        self._waiting.append(request)

    def step(self) -> list[Trajectory]:
        rows = self._rows
        if rows.size == 0:
            self._due = self._now()
        while self.joining and self._waiting and rows.size < rows.slots:
            request, cut = self._waiting.take()
            self._widest = max(self._widest, len(request.prompt_ids) + request.sampling.max_new_tokens)
            rows.join(request, self.length(request), self.lineage, self.version)
            if cut:
                rows.interrupt(request.id)
        if rows.size == 0:
            return []
        self._pace(rows.size, int(rows.position[: rows.size].sum()))
        self._write()
        ended = rows.finished(STOP)
        trajectories = [rows.take(row, STOP) for row in ended.tolist()]
        rows.leave(ended)
        return trajectories

    def interrupt(self, request: int) -> None:
        if request in self._rows:
            self._rows.interrupt(request)
        else:
            self._waiting.interrupt(request)

    def withdraw(self, request: int) -> Request | None:
        """Remove a queued request and return it; return None if it runs or has finished."""
        return self._waiting.withdraw(request)

    def abort(self, request: int) -> None:
        if (row := self._rows.row(request)) is not None:
            self._rows.leave(np.array([row]))
        else:
            self._waiting.withdraw(request)

    def load(self, tensors: Mapping[str, NDArray[np.generic]], lineage: Lineage, version: Version) -> None:
        self.lineage, self.version = lineage, version
        self._rows.turn(lineage, version)

    def stats(self) -> EngineStats:
        kv_tokens = int(self._rows.position[: self._rows.size].sum())
        return EngineStats(
            running=self._rows.size,
            waiting=len(self._waiting),
            kv_used=min(1.0, kv_tokens / (self._rows.slots * self._widest)),
            kv_tokens=kv_tokens,
            kv_capacity=self._rows.slots * self._widest,
            slots=self._rows.slots,
            generated_tokens=self._generated,
            steps=self._steps,
        )

    def length(self, request: Request) -> int:
        """Return the number of tokens this request will have, fixed by its prompt, its seed and the engine's seed."""
        written = sum(len(segment.token_ids) for segment in request.prefix)
        prompt = zlib.crc32(request.prompt_ids.tobytes())
        return max(written + 1, self._lengths.tokens(prompt, request.seed, request.sampling.max_new_tokens))

    def _write(self) -> None:
        """Write one random token per row. A row that ends before its token limit ends with the stop token."""
        rows = self._rows
        here = slice(0, rows.size)
        uniform = uniforms(rows.seed[here], rows.count[here])
        token_ids = 1 + (uniform * (VOCABULARY - 1)).astype(np.int64)
        limits = np.array([request.sampling.max_new_tokens for request in rows.requests])
        ends = (rows.count[here] + 1 == rows.limit[here]) & (rows.limit[here] < limits)
        token_ids[ends] = STOP[0]
        logprobs = np.full(rows.size, -math.log(VOCABULARY), np.float32)
        rows.write(0, rows.size, token_ids, logprobs)
        self._generated += rows.size
        self._steps += 1

    def _pace(self, running: int, kv_tokens: int) -> None:
        cost = self._cost
        lasts = cost.k1 * kv_tokens + max(cost.k2, cost.k3 * running) + cost.k4
        now = self._now()
        self._due = max(self._due, now - lasts) + lasts  # the next step compensates for oversleeping in this one
        if self._due > now:
            self._sleep(self._due - now)
