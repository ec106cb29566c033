"""Event loops behind blocking clients: each runs in a thread of its own, beside a caller that blocks."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

import uvloop

T = TypeVar("T")


class Cancellable(Protocol):
    """Cancellable background work."""

    def cancel(self) -> object: ...


class Background(Protocol):
    """The event loop behind a blocking caller: ``LoopThread``, or virtual time in ``staleflow.sim.faults``."""

    closed: bool

    def start(self, work: Coroutine[Any, Any, Any]) -> Cancellable:
        """Run in the background."""
        ...

    def wait(self, work: Coroutine[Any, Any, T], grace_s: float, late: Callable[[], Exception]) -> T:
        """Return the result; after a stop request, raise ``late()`` once ``grace_s`` seconds have passed."""
        ...

    def stop_waiting(self) -> None:
        """End all waits soon; may be called from any thread."""
        ...

    def close(self, last: Callable[[], None]) -> None:
        """Run ``last`` on the loop and end the remaining work."""
        ...


async def until_stop(
    work: Coroutine[Any, Any, T], stopping: asyncio.Event, grace_s: float, late: Callable[[], Exception]
) -> T:
    """Return the result of ``work``; raise ``late()`` if it has not finished ``grace_s`` seconds after ``stopping``."""
    task, stop = asyncio.ensure_future(work), asyncio.ensure_future(stopping.wait())
    try:
        await asyncio.wait((task, stop), return_when=asyncio.FIRST_COMPLETED)
        if not task.done() and grace_s:
            await asyncio.wait((task,), timeout=grace_s)
        if not task.done():
            raise late()
        return task.result()
    finally:
        stop.cancel()
        task.cancel()


async def within(seconds: float, call: Coroutine[Any, Any, T]) -> T | None:
    """Return the result of ``call``; cancel it and return None after ``seconds``."""
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            return await call
    except TimeoutError:
        if not limit.expired():
            raise
        return None


class LoopThread:
    """An event loop in its own thread, for a blocking caller."""

    def __init__(self, name: str) -> None:
        self._loop = uvloop.new_event_loop()
        self._stopping = asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()
        self.closed = False

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run in the background; the returned future can be cancelled."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def result(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result; an interrupt of the caller cancels the work."""
        future = self.start(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def wait(self, work: Coroutine[Any, Any, T], grace_s: float, late: Callable[[], Exception]) -> T:
        """Return the result; after a stop request, raise ``late()`` once ``grace_s`` seconds have passed."""
        waiting = until_stop(work, self._stopping, grace_s, late)
        return asyncio.run_coroutine_threadsafe(waiting, self._loop).result()

    def stop_waiting(self) -> None:
        if not self.closed:
            self._loop.call_soon_threadsafe(self._stopping.set)

    def close(self, last: Callable[[], None]) -> None:
        """Run ``last`` on the loop, cancel the remaining tasks, and end the thread."""
        self.closed = True
        asyncio.run_coroutine_threadsafe(self._end(last), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self, last: Callable[[], None]) -> None:
        last()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        await self._loop.shutdown_default_executor()
