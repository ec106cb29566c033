"""A thread of a simulated process, for shipped code that blocks: it runs only while the conductor waits for it.

Exactly one of both runs at any time, so the order of everything is as fixed as without threads. A thread that waits is
a task of its process's loop that has not ended: when the process is stopped or killed, it goes no further.
"""

import asyncio
import threading
from asyncio import events
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from staleflow.clients.trainer.client import until_stop
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
        """Held; released to give the turn to the thread, and to the conductor."""
        self._mine.acquire()
        self._theirs.acquire()
        self._parked = False
        process.on_close.append(self._close)

    async def run(self, function: Callable[[], T]) -> T:
        """Return what ``function`` returns in a thread."""
        done: asyncio.Future[T] = self._loop.create_future()

        def main() -> None:
            events._set_running_loop(self._loop)  # its code is that of this process
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

    # --- what the thread calls -----------------------------------------------------------------------------------

    def start(self, work: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        """Run in the background."""
        task = self._loop.create_task(work)
        self._started.append(task)
        return task

    def wait(self, work: Coroutine[Any, Any, T], grace_s: float, late: Callable[[], Exception]) -> T:
        """Return the result; once asked to stop, ``late()`` is raised ``grace_s`` seconds after."""
        self._check_alive(work)
        return self.until(until_stop(work, self._stopping, grace_s, late))

    def until(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result, whatever it takes."""
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
        """``Killed`` in a thread that is being buried: nothing of ``work`` happens."""
        if not self._process.alive:
            work.close()
            raise Killed

    def sleep(self, seconds: float) -> None:
        self.until(asyncio.sleep(seconds))

    def stop_waiting(self) -> None:
        self._stopping.set()

    def close(self, last: Callable[[], None]) -> None:
        """Run ``last`` on the loop and end what is left."""
        self.closed = True

        async def end() -> None:
            last()
            for task in self._started:
                task.cancel()
            await asyncio.gather(*self._started, return_exceptions=True)

        self.until(end())

    # --- what the conductor calls --------------------------------------------------------------------------------

    def _turn(self) -> None:
        """Let the thread run until it waits or ends."""
        self._mine.release()
        self._theirs.acquire()

    def _close(self) -> None:
        """End a thread that waits in a process that is dead."""
        if self._parked:
            self._turn()

    def _park(self) -> None:
        """Wait for the turn, in the thread."""
        self._mine.acquire()
        self._parked = False
