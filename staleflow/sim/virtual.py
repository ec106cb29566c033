"""Processes in virtual time: each has its own asyncio loop, and one conductor runs them in a fixed order.

- ``loop.time()`` is the virtual clock; it stands still while anything can run. Threads run at once, in order.
- ``kill`` is ``kill -9``: no line of the process runs again, not even a ``finally``. Its pending work is kept until
  ``Conductor.close``, so that no garbage collector runs it.
- A stopped process keeps its place: events that fall due meanwhile run late, when it continues.
"""

import asyncio
import contextlib
import contextvars
from asyncio import events
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Final

from staleflow.sim.timeline import Timeline

BEGIN_S: Final = 1_000.0
"""Monotonic time at the start; not 0, because servers use 0 for "never"."""


class Killed(KeyboardInterrupt):
    """Unwinds a process that was killed in the middle of a call; asyncio does not swallow this kind of exception."""


class Process:
    """Code that runs under one name until it ends or is killed."""

    def __init__(self, conductor: "Conductor", name: str) -> None:
        self.name = name
        self.alive = True
        self.stopped = False
        self.busy_until_s = 0.0
        """Messages sent before this time leave at this time: the process waits for its disk."""
        self.last_arrival_s = 0.0
        """Time at which the last message that it sent arrives."""
        self.error: BaseException | None = None
        """The error that ended it, if it was one of its own."""
        self.on_end: list[Callable[[], None]] = []
        self.on_close: list[Callable[[], None]] = []
        """Callbacks that release its threads when the simulation is closed."""
        self.loop = SimLoop(conductor, self)
        self.main: asyncio.Task[Any] | None = None

    @property
    def runs(self) -> bool:
        return self.alive and not self.stopped


def current() -> Process:
    """Return the process whose code is running."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SimLoop)
    return loop.process


class SimTask(asyncio.Task[Any]):
    """A task with the same hash in every run, so that sets of tasks iterate in the same order."""

    def __init__(self, number: int, coroutine: Coroutine[Any, Any, Any], **options: Any) -> None:
        self._number = number
        super().__init__(coroutine, **options)

    def __hash__(self) -> int:
        return self._number


class SimLoop(asyncio.BaseEventLoop):
    """The loop of one process."""

    def __init__(self, conductor: "Conductor", process: Process) -> None:
        super().__init__()
        self.conductor = conductor
        self.process = process
        self.ready: deque[asyncio.Handle] = deque()
        self.scheduled = False
        """True while the conductor's queue holds a turn of this loop."""
        self.tasks: dict[SimTask, None] = {}
        self._number = 0
        factory: Any = self._task  # only coroutines become tasks here
        self.set_task_factory(factory)

    def _task(self, _: Any, coroutine: Coroutine[Any, Any, Any], **options: Any) -> SimTask:
        self._number += 1
        task = SimTask(self._number, coroutine, loop=self, **options)
        self.tasks[task] = None
        task.add_done_callback(lambda done: self.tasks.pop(task, None))
        return task

    def time(self) -> float:
        return self.conductor.now_s

    # The signatures of the base class have parameters that this loop does not need.

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self.push(handle)
        return handle

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        return self.call_soon(callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        self.conductor.at(when, self.push, timer)
        return timer

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Leave the handle in the conductor's queue, where it does nothing."""

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> "asyncio.Future[Any]":
        done = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:
            done.set_exception(error)
        return done

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """End the process at an error in a callback, as ``process.daemon`` does."""
        error = context.get("exception")
        if isinstance(error, Exception) and self.process.alive:
            self.conductor.fail(self.process, error)

    def push(self, handle: asyncio.Handle) -> None:
        """Run the handle in the process's next turn."""
        if not handle.cancelled() and self.process.alive:
            self.ready.append(handle)
            if not self.scheduled and not self.process.stopped:
                self.conductor.wake(self)


class Conductor(Timeline):
    """Virtual time, and the order of the processes."""

    def __init__(self, begin_s: float = BEGIN_S) -> None:
        super().__init__(begin_s)
        self._all: list[Process] = []

    def spawn(self, name: str, main: Callable[[], Coroutine[Any, Any, Any]]) -> Process:
        """Start a process; ``main`` is called inside it."""
        process = Process(self, name)
        self._all.append(process)

        def begin() -> None:
            process.main = process.loop.create_task(main())
            process.main.add_done_callback(lambda task: self._ended(process, task))

        process.loop.call_soon(begin)
        return process

    def _ended(self, process: Process, task: "asyncio.Task[Any]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            process.error = process.error or error
        self.kill(process)

    def fail(self, process: Process, error: BaseException) -> None:
        """End the process with an error of its own."""
        process.error = process.error or error
        self.kill(process)

    def kill(self, process: Process) -> None:
        """``kill -9``; no effect on a process that has ended."""
        if process.alive:
            process.alive = False
            process.loop.ready.clear()
            for callback in process.on_end:
                callback()

    def alive(self) -> list[Process]:
        """Return the processes that have not ended, oldest first."""
        return [process for process in self._all if process.alive]

    def stop(self, process: Process) -> None:
        """``SIGSTOP``."""
        process.stopped = True

    def resume(self, process: Process) -> None:
        """``SIGCONT``."""
        process.stopped = False
        if process.loop.ready:
            self.wake(process.loop)

    def wake(self, loop: SimLoop) -> None:
        """Schedule a turn of a loop that has something to do."""
        if not loop.scheduled:
            loop.scheduled = True
            self.soon(self._turn, loop)

    def _turn(self, loop: SimLoop) -> None:
        """Run the ready handles of one process; handles that become ready meanwhile wait for its next turn."""
        loop.scheduled = False
        process, ready = loop.process, loop.ready
        if not process.runs:
            return
        events._set_running_loop(loop)
        try:
            for _ in range(len(ready)):
                handle = ready.popleft()
                if not handle.cancelled():
                    handle._run()
                    if not ready or process.stopped:  # a process that was killed has nothing left
                        break
        except Killed:
            self.kill(process)
        finally:
            events._set_running_loop(None)
        if ready and process.runs:
            self.wake(loop)

    def close(self) -> None:
        """Discard everything that is pending in any process."""
        for process in self._all:
            process.alive = False
            loop = process.loop
            loop.ready.clear()
            events._set_running_loop(loop)
            try:
                for callback in process.on_close:
                    callback()
                for task in list(loop.tasks):
                    _discard(task)
            finally:
                events._set_running_loop(None)
            loop.tasks.clear()
            loop.close()
        self._later.clear()
        self._soon.clear()


def _discard(task: SimTask) -> None:
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    coroutine: Any = task.get_coro()
    for _ in range(10):  # a ``finally`` that awaits refuses to end the first time
        with contextlib.suppress(BaseException):
            coroutine.close()
            return
