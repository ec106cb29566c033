"""A thread of a simulated process, for shipped code that blocks: it runs only while the conductor waits for it.

Exactly one of the two runs at any time, so the order of all events is as deterministic as without threads. A waiting
thread is an unfinished task of its process's loop: when the process is stopped or killed, the thread does not continue.
"""

import asyncio
import threading
from asyncio import events
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from staleflow.clients.background import until_stop
from staleflow.sim.virtual import Killed, Process

T = TypeVar("T")


class Lockstep:
    """The thread of one process, and the ``Background`` of the client inside it."""

    def __init__(self, process: Process) -> None:
        self.closed = False
        self._process = process
        self._loop = process.loop
        self._stopping = asyncio.Event()
        self._started: list[asyncio.Task[Any]] = []
        self._mine, self._theirs = threading.Lock(), threading.Lock()
        """Normally locked; released to pass the turn to the thread, and to the conductor."""
        self._mine.acquire()
        self._theirs.acquire()
        self._parked = False
        process.on_close.append(self._close)

    async def run(self, function: Callable[[], T]) -> T:
        """Run ``function`` in a thread and return its result."""
        done: asyncio.Future[T] = self._loop.create_future()

        def main() -> None:
            events._set_running_loop(self._loop)  # code of the thread belongs to this process
            self._park()
            try:
                result = function()
                if self._process.alive:
                    done.set_result(result)
            except Exception as error:
                if self._process.alive:
                    done.set_exception(error)
            except Killed:
                pass
            finally:
                self._theirs.release()

        self._parked = True
        threading.Thread(target=main, name=self._process.name, daemon=True).start()
        self._turn()
        return await done

    # --- called by the thread ------------------------------------------------------------------------------------

    def start(self, work: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        """Run ``work`` in the background."""
        task = self._loop.create_task(work)
        self._started.append(task)
        return task

    def wait(self, work: Coroutine[Any, Any, T], grace_s: float, late: Callable[[], Exception]) -> T:
        """Return the result of ``work``. Once a stop is requested, raise ``late()`` after ``grace_s`` seconds."""
        self._check_alive(work)
        return self.until(until_stop(work, self._stopping, grace_s, late))

    def until(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of ``work``, however long it takes."""
        self._check_alive(work)
        task = self._loop.create_task(work)
        task.add_done_callback(lambda _: self._turn())
        self._parked = True
        self._theirs.release()
        self._park()
        if not self._process.alive:
            raise Killed
        return task.result()

    def _check_alive(self, work: Coroutine[Any, Any, Any]) -> None:
        """Raise ``Killed`` in a thread of a dead process, without running any of ``work``."""
        if not self._process.alive:
            work.close()
            raise Killed

    def sleep(self, seconds: float) -> None:
        self.until(asyncio.sleep(seconds))

    def stop_waiting(self) -> None:
        self._stopping.set()

    def close(self, last: Callable[[], None]) -> None:
        """Run ``last`` on the loop and end the remaining tasks."""
        self.closed = True

        async def end() -> None:
            last()
            for task in self._started:
                task.cancel()
            await asyncio.gather(*self._started, return_exceptions=True)

        self.until(end())

    # --- called by the conductor ---------------------------------------------------------------------------------

    def _turn(self) -> None:
        """Let the thread run until it waits or ends."""
        self._mine.release()
        self._theirs.acquire()

    def _close(self) -> None:
        """End a waiting thread of a dead process."""
        if self._parked:
            self._turn()

    def _park(self) -> None:
        """Wait for the turn, in the thread."""
        self._mine.acquire()
        self._parked = False
