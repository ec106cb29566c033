"""An ``Engine`` in a thread of its own: steps as long as there is work, sleeps when there is none.

The event loop stays free while a step runs, so heartbeats, pushes and pulls go on. Everything that the engine is told
is done by its thread, between two steps, in the order it was said. An engine that raises ends the thread: every waiting
caller gets ``EngineError``, and ``failure`` says so to the worker.
"""

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from staleflow.clients.out_of_memory import out_of_memory
from staleflow.clients.rollout.engines.base import Engine, EngineError, EngineStats, Request, Trajectory
from staleflow.clients.rollout.engines.throughput import Throughput
from staleflow.protocols.consistency.ids import Lineage, Version
from staleflow.protocols.wire.trajectory import Finish

log = logging.getLogger(__name__)

CLOSE_S = 2.0


@dataclass(slots=True)
class PendingLoad:
    tensors: Mapping[str, NDArray[np.generic]]
    lineage: Lineage
    version: Version
    done: "asyncio.Future[None]"


class EngineThread:
    """Consumes requests, produces trajectories; waits for its inbox when idle. Made inside a running event loop."""

    def __init__(self, engine: Engine, *, drain: bool = False) -> None:
        """``drain``: what runs ends with the old weights before new ones are loaded; otherwise it goes on with them."""
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._engine = engine
        self._drain = drain
        self._loop = asyncio.get_running_loop()
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._futures: dict[int, asyncio.Future[Trajectory]] = {}
        self._load: PendingLoad | None = None
        self._stats = engine.stats()
        self._busy_s = 0.0
        self._step_began: float | None = None
        self._throughput = Throughput()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    async def generate(self, request: Request) -> Trajectory:
        """The finished trajectory. ``RequestError`` when it cannot be served, ``CancelledError`` after ``abort``."""
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
        """End it with the tokens so far. ``least`` 0: one that waits ends at once, without another token."""
        self._inbox.put(lambda: self._interrupt(request, least))

    def abort(self, request: int) -> None:
        if (future := self._futures.get(request)) is not None:
            future.cancel()

    async def load(self, tensors: Mapping[str, NDArray[np.generic]], lineage: Lineage, version: Version) -> None:
        """Returns when the next token will be written by these weights. ``LoadError`` keeps the old ones."""
        done: asyncio.Future[None] = self._loop.create_future()
        self._inbox.put(lambda: self._take_load(PendingLoad(tensors, lineage, version, done)))
        await done

    def stats(self) -> EngineStats:
        return self._stats

    def busy_s(self) -> float:
        """Seconds spent in steps."""
        return self._busy_s

    def tokens_per_s(self) -> float:
        """Over the last few seconds."""
        return self._throughput.per_s(self._stats.generated_tokens)

    def stuck_s(self) -> float:
        began = self._step_began
        return 0.0 if began is None else time.monotonic() - began

    async def close(self, limit_s: float | None = CLOSE_S) -> None:
        """Stop after the step under way, or leave it behind if it hangs; the thread ends with the process.

        ``limit_s``: of a step that hangs; None waits, for a model that is somebody else's afterwards.
        """
        self._inbox.put(self._stop)
        await asyncio.to_thread(self._thread.join, limit_s)
        for future in self._futures.values():
            future.cancel()

    # --- the engine's thread ---

    def _run(self) -> None:
        try:
            while not self._closing:
                self._obey()
                self._try_load()
                if self._stats.running or (self._stats.waiting and self._engine.joining):
                    self._step()
        except Exception as error:  # boundary of the thread: whatever the engine raises ends it, and the worker is told
            log.exception("the engine failed")
            failure = EngineError(f"the engine failed: {error!r}{advice(error)}")
            failure.__cause__ = error
            self._tell(self._fail, failure)

    def _obey(self) -> None:
        """Do everything in the inbox; when there is nothing to step, wait for something."""
        idle = not (self._stats.running or self._stats.waiting or self._load)
        try:
            while True:
                self._inbox.get(block=idle)()
                idle = False
        except queue.Empty:
            self._stats = self._engine.stats()

    def _step(self) -> None:
        self._step_began = began = time.monotonic()
        ended = self._engine.step()
        now = time.monotonic()
        self._step_began = None
        self._busy_s += now - began
        self._stats = self._engine.stats()
        self._throughput.record(self._stats.generated_tokens)
        if ended:
            self._tell(self._deliver, ended)

    def _submit(self, request: Request) -> None:
        try:
            self._engine.submit(request)
        except EngineError as error:
            self._tell(self._refuse, request.id, error)

    def _interrupt(self, request: int, least: int) -> None:
        taken = self._engine.withdraw(request) if least == 0 else None
        if taken is None:
            self._engine.interrupt(request)
        else:
            ended = Trajectory(id=request, segments=taken.prefix, finish=Finish.INTERRUPTED)
            self._tell(self._deliver, [ended])

    def _take_load(self, load: PendingLoad) -> None:
        if (older := self._load) is not None:
            self._tell(
                _settle, older.done, EngineError(f"version {load.version} came before {older.version} was loaded")
            )
        self._load = load
        self._engine.joining = not self._drain

    def _try_load(self) -> None:
        load = self._load
        if load is None or (self._drain and self._stats.running):
            return
        try:
            self._engine.load(load.tensors, load.lineage, load.version)
            self._tell(_settle, load.done, None)
        except EngineError as error:
            self._tell(_settle, load.done, error)
        self._load = None
        self._engine.joining = True

    def _stop(self) -> None:
        self._closing = True

    def _tell(self, call: Callable[..., None], *args: object) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(call, *args)

    # --- the event loop's side ---

    def _deliver(self, ended: list[Trajectory]) -> None:
        for trajectory in ended:
            if (future := self._futures.get(trajectory.id)) is not None and not future.done():
                future.set_result(trajectory)

    def _refuse(self, request: int, error: EngineError) -> None:
        if (future := self._futures.get(request)) is not None and not future.done():
            future.set_exception(error)

    def _fail(self, error: EngineError) -> None:
        for request in list(self._futures):
            self._refuse(request, error)
        if not self.failure.done():
            self.failure.set_exception(error)


def advice(error: Exception) -> str:
    """What to change about an engine that failed so."""
    return "; lower rollout.max_inflight, or rollout.max_new_tokens" if out_of_memory(error) else ""


def _settle(future: "asyncio.Future[None]", error: EngineError | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
