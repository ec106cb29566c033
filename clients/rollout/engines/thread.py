"""Run an ``Engine`` in its own thread, which steps while it has work and sleeps otherwise.

The event loop stays free during a step, so heartbeats, pushes and pulls continue. The thread executes all calls to the
engine between two steps, in the order in which they were made. If the engine raises, the thread ends: every waiting
caller gets ``EngineError``, and the worker sees the error in ``failure``.
"""

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from staleflow.clients.out_of_memory import out_of_memory
from staleflow.clients.rollout.engines.base import Engine, EngineError, EngineStats, Request, Trajectory
from staleflow.clients.rollout.engines.throughput import Throughput
from staleflow.protocols.consistency.ids import Lineage, Version
from staleflow.protocols.wire.trajectory import Finish

log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 2.0


@dataclass(slots=True)
class PendingLoad:
    tensors: Mapping[str, NDArray[np.generic]]
    lineage: Lineage
    version: Version
    done: "asyncio.Future[None]"


class EngineThread:
    """Consume requests, produce trajectories, wait for the inbox when idle. Create it inside a running event loop."""

    def __init__(self, engine: Engine, *, drain: bool = False) -> None:
        """With ``drain``, a load waits until running requests finish; otherwise they continue with the new weights."""
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._engine = engine
        self._drain = drain
        self._loop = asyncio.get_running_loop()
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._futures: dict[int, asyncio.Future[Trajectory]] = {}
        self._load: PendingLoad | None = None
        self._stats = engine.stats()
        self._busy_s = 0.0
        self._paused_s = 0.0
        self._step_started_at: float | None = None
        self._throughput = Throughput()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    async def generate(self, request: Request) -> Trajectory:
        """Return the finished trajectory. Raise ``RequestError`` if unservable, ``CancelledError`` on ``abort``."""
        future: asyncio.Future[Trajectory] = self._loop.create_future()
        if self.failure.done():
            raise EngineError("the engine has failed")
        self._futures[request.id] = future
        self._inbox.put(lambda: self._submit(request))
        try:
            return await future
        finally:
            self._futures.pop(request.id, None)
            if future.cancelled():
                self._inbox.put(lambda: self._engine.abort(request.id))

    def interrupt(self, request: int, least: int = 1) -> None:
        """Finish a request with its tokens so far. With ``least`` 0, a queued request ends at once."""
        self._inbox.put(lambda: self._interrupt(request, least))

    def abort(self, request: int) -> None:
        if (future := self._futures.get(request)) is not None:
            future.cancel()

    async def load(self, tensors: Mapping[str, NDArray[np.generic]], lineage: Lineage, version: Version) -> None:
        """Return once the next token will come from these weights. On ``LoadError`` the old weights stay loaded."""
        done: asyncio.Future[None] = self._loop.create_future()
        self._inbox.put(lambda: self._queue_load(PendingLoad(tensors, lineage, version, done)))
        await done

    def stats(self) -> EngineStats:
        return self._stats

    def busy_s(self) -> float:
        """Return the seconds spent in steps."""
        return self._busy_s

    def tokens_per_s(self) -> float:
        """Return the generation rate over the last few seconds."""
        return self._throughput.per_s(self._stats.generated_tokens)

    def stuck_s(self) -> float:
        started_at = self._step_started_at
        return 0.0 if started_at is None else time.monotonic() - started_at

    async def close(self, limit_s: float | None = CLOSE_TIMEOUT_S) -> None:
        """Stop after the current step. A thread that hangs is abandoned and ends with the process.

        ``limit_s`` bounds the wait for the thread. None waits without bound, for a model that is used again afterwards.
        """
        self._inbox.put(self._stop)
        await asyncio.to_thread(self._thread.join, limit_s)
        for future in self._futures.values():
            future.cancel()

    # --- the engine's thread ---

    def _run(self) -> None:
        try:
            while not self._closing:
                self._run_inbox()
                self._try_load()
                if self._stats.running or (self._stats.waiting and self._engine.joining):
                    self._step()
        except Exception as error:  # thread boundary: any engine exception ends the thread and reaches the worker
            log.exception("the engine failed")
            failure = EngineError(f"the engine failed: {error!r}{advice(error)}")
            failure.__cause__ = error
            self._call_soon(self._fail, failure)

    def _run_inbox(self) -> None:
        """Run all calls in the inbox; block for the next one if there is nothing to step."""
        idle = not (self._stats.running or self._stats.waiting or self._load)
        try:
            while True:
                self._inbox.get(block=idle)()
                idle = False
        except queue.Empty:
            self._refresh()

    def _refresh(self) -> None:
        self._stats = replace(self._engine.stats(), paused_s=self._paused_s)

    def _step(self) -> None:
        self._step_started_at = started_at = time.monotonic()
        ended = self._engine.step()
        now = time.monotonic()
        self._step_started_at = None
        self._busy_s += now - started_at
        self._refresh()
        self._throughput.record(self._stats.generated_tokens)
        if ended:
            self._call_soon(self._deliver, ended)

    def _submit(self, request: Request) -> None:
        try:
            self._engine.submit(request)
        except EngineError as error:
            self._call_soon(self._reject, request.id, error)

    def _interrupt(self, request: int, least: int) -> None:
        withdrawn = self._engine.withdraw(request) if least == 0 else None
        if withdrawn is None:
            self._engine.interrupt(request)
        else:
            ended = Trajectory(id=request, segments=withdrawn.prefix, finish=Finish.INTERRUPTED)
            self._call_soon(self._deliver, [ended])

    def _queue_load(self, load: PendingLoad) -> None:
        if (older := self._load) is not None:
            self._call_soon(
                _resolve, older.done, EngineError(f"version {load.version} came before {older.version} was loaded")
            )
        self._load = load
        self._engine.joining = not self._drain

    def _try_load(self) -> None:
        load = self._load
        if load is None or (self._drain and self._stats.running):
            return
        failed, started_at = None, time.monotonic()
        try:
            self._engine.load(load.tensors, load.lineage, load.version)
        except EngineError as error:
            failed = error
        self._paused_s += time.monotonic() - started_at
        self._refresh()
        self._call_soon(_resolve, load.done, failed)
        self._load = None
        self._engine.joining = True

    def _stop(self) -> None:
        self._closing = True

    def _call_soon(self, call: Callable[..., None], *args: object) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(call, *args)

    # --- the event loop's side ---

    def _deliver(self, ended: list[Trajectory]) -> None:
        for trajectory in ended:
            if (future := self._futures.get(trajectory.id)) is not None and not future.done():
                future.set_result(trajectory)

    def _reject(self, request: int, error: EngineError) -> None:
        if (future := self._futures.get(request)) is not None and not future.done():
            future.set_exception(error)

    def _fail(self, error: EngineError) -> None:
        for request in list(self._futures):
            self._reject(request, error)
        if not self.failure.done():
            self.failure.set_exception(error)


def advice(error: Exception) -> str:
    """Return the configuration change that helps against this failure, or ""."""
    return "; lower rollout.max_inflight, or rollout.max_new_tokens" if out_of_memory(error) else ""


def _resolve(future: "asyncio.Future[None]", error: EngineError | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
