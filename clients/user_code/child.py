"""Process of a reward function: ``python -m staleflow.clients.user_code.child``, started by the runner.

It also has what every process of user code needs; ``group_child`` serves stages with it, and
``rollout.environment_child`` environments.

User code may print, hang, raise, leak or crash here; only an answer or the end of the pipe reaches the worker. The
process ends with its parent, along with everything that it started: it has a session of its own, which the kernel
kills.
"""

import asyncio
import contextlib
import fcntl
import inspect
import os
import queue
import signal
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

from staleflow.clients.user_code import pipe
from staleflow.clients.user_code.mark import Marker, works_for
from staleflow.configs.errors import ConfigError
from staleflow.configs.imports import load_object
from staleflow.configs.rewards import arguments, list_arguments, listed, objection, takes_lists

NOUN = "the reward"
"""Name of the function in messages to the operator."""
OURS = str(Path(__file__).parent.parent)
"""Folder of staleflow's own code. An error whose traceback has no other files is an error of the call itself."""
INSTALLED = ("<", *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")))
"""Prefixes of files that are not the user's code for this run."""
POLL_INTERVAL_S = 0.1
"""Interval of the check that the loop of an ``async def`` is responsive."""


class Called(Protocol):
    """A user's function that answers calls; ``awaited`` is used for an ``async def``."""

    def called(self, call: Any) -> pipe.Answer: ...

    async def awaited(self, call: Any) -> pipe.Answer: ...


class Reward:
    """Reward function, called with one sample, or with lists if it takes them."""

    def __init__(self, function: Callable[..., Any], load: pipe.Load) -> None:
        self._function = function
        self._noun = noun_of(load)

    def called(self, call: pipe.Call | pipe.ListCall) -> pipe.Answer:
        return self._judged(call, self._call(call))

    async def awaited(self, call: pipe.Call | pipe.ListCall) -> pipe.Answer:
        return self._judged(call, await self._call(call))

    def _call(self, call: pipe.Call | pipe.ListCall) -> Any:
        if isinstance(call, pipe.ListCall):
            prompts = [call.prompt] * len(call.completions)
            named = list_arguments(self._function, prompts, call.completions, call.columns, call.facts)
            return self._function(**named)
        given, named = arguments(self._function, call.prompt, call.completion, call.columns, call.facts)
        return self._function(*given, **named)

    def _judged(self, call: pipe.Call | pipe.ListCall, returned: Any) -> pipe.Answer:
        if isinstance(call, pipe.Call):
            return judged(call.id, returned, self._noun)
        values, wrong = listed(returned, len(call.completions))
        return pipe.Answer(id=call.id, values=values, error=f"{self._noun} is {wrong}" if wrong else "")


def main() -> int:
    """Serve calls until the parent closes the pipe."""
    return serve(noun_of, Reward)


def noun_of(load: pipe.Load) -> str:
    """Return the name of a reward function in messages to the operator; one of several has a name of its own."""
    return f"{NOUN} {load.stage}".rstrip()


def serve(noun_of: Callable[[pipe.Load], str], make_handler: Callable[[Callable[..., Any], pipe.Load], Called]) -> int:
    """Import the code that the parent names and serve calls of it until the parent closes the pipe; return the exit
    code."""
    incoming, outgoing = take_over_pipes()
    load = pipe.to_child.decode(pipe.read(incoming) or b"")
    if not isinstance(load, pipe.Load):
        return 2
    noun = noun_of(load)
    try:
        function = load_object(load.run, noun)
    except ConfigError as error:
        outgoing.write(pipe.frame(pipe.NotLoaded(why=error.allowed)))
        return 2
    concurrent, served = inspect.iscoroutinefunction(function), make_handler(function, load)
    outgoing.write(pipe.frame(pipe.Loaded(concurrent=concurrent, lists=takes_lists(function))))
    if concurrent:
        asyncio.run(serve_concurrently(served.awaited, load.timeout_s, incoming, outgoing, noun=noun))
    else:
        serve_in_turn(served.called, incoming, outgoing, noun=noun)
    return 0


def take_over_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Reserve the pipes for staleflow: prints of user code go to stderr, its standard input is empty.

    The last argument of the command line is the parent's lifeline, which stays open from here on; the one before it is
    the mark.
    """
    end_with(int(sys.argv.pop()))
    incoming = os.fdopen(os.dup(0), "rb")
    outgoing = os.fdopen(os.dup(1), "wb", buffering=0)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    return incoming, outgoing


def end_with(lifeline: int) -> None:
    """Have the kernel kill this process group when the other end of a pipe is closed.

    That needs no code of this process to run: user code may hold the interpreter lock for hours in one library call.
    """
    os.set_inheritable(lifeline, False)
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    # Armed last: the signal and its receiver must be set before it can be sent.
    fcntl.fcntl(lifeline, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
    with contextlib.suppress(BlockingIOError):
        os.read(lifeline, 1)
        os._exit(1)  # the parent ended before the signal was armed


def _read_calls(incoming: BinaryIO, hand_over: Callable[[Any], Any]) -> None:
    while (data := pipe.read(incoming)) is not None:
        call = pipe.to_child.decode(data)
        if not isinstance(call, pipe.Load):
            hand_over(call)
    os.killpg(os.getpid(), signal.SIGKILL)  # the parent is gone, and a hanging call must not keep this process alive


def serve_in_turn(serve: Callable[[Any], pipe.Answer], incoming: BinaryIO, outgoing: BinaryIO, *, noun: str) -> None:
    """Serve calls one after another until the parent closes the pipe."""
    calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_read_calls, args=(incoming, calls.put), daemon=True).start()
    while True:
        call = calls.get()
        try:
            answer = serve(call)
        except (Exception, SystemExit) as error:
            answer = pipe.Answer(id=call.id, error=reason(error, noun))
        outgoing.write(pipe.frame(answer))


async def serve_concurrently(
    serve: Callable[[Any], Awaitable[pipe.Answer]],
    timeout_s: float,
    incoming: BinaryIO,
    outgoing: BinaryIO,
    *,
    noun: str,
) -> None:
    """Serve calls concurrently, each within ``timeout_s``, until the parent closes the pipe."""
    loop = asyncio.get_running_loop()
    calls: asyncio.Queue[pipe.AnyCall | pipe.Cancel] = asyncio.Queue()
    tasks: dict[int, asyncio.Task[None]] = {}

    def hand_over(call: pipe.AnyCall | pipe.Cancel) -> None:
        loop.call_soon_threadsafe(calls.put_nowait, call)

    def ended(number: int, task: "asyncio.Task[None]") -> None:
        del tasks[number]
        if task.cancelled():
            outgoing.write(pipe.frame(pipe.Answer(id=number, error=f"{noun} was cancelled")))

    threading.Thread(target=_read_calls, args=(incoming, hand_over), daemon=True).start()
    threading.Thread(target=_watch, args=(loop, timeout_s, outgoing), daemon=True).start()
    Marker(int(sys.argv.pop())).install(loop)
    while True:
        call = await calls.get()
        if isinstance(call, pipe.Cancel):
            if call.id in tasks:
                tasks[call.id].cancel()
            continue
        task = loop.create_task(_answer(serve, call, timeout_s, outgoing, noun), name=str(call.id))
        tasks[call.id] = task
        task.add_done_callback(partial(ended, call.id))


async def _answer(
    serve: Callable[[Any], Awaitable[pipe.Answer]],
    call: pipe.AnyCall,
    timeout_s: float,
    outgoing: BinaryIO,
    noun: str,
) -> None:
    limit = asyncio.timeout(timeout_s)
    works_for(call.id)
    try:
        async with limit:
            result = await serve(call)
    except (Exception, SystemExit) as error:
        late = isinstance(error, TimeoutError) and limit.expired()
        result = pipe.Answer(id=call.id, error=took_too_long(timeout_s, noun) if late else reason(error, noun))
    outgoing.write(pipe.frame(result))


def _watch(loop: asyncio.AbstractEventLoop, timeout_s: float, outgoing: BinaryIO) -> None:
    """Exit if one call blocks the loop, and so all others, for ``timeout_s``; report that call first."""
    alive = threading.Event()
    while True:
        alive.clear()
        loop.call_soon_threadsafe(alive.set)
        if alive.wait(timeout_s):
            time.sleep(min(timeout_s, POLL_INTERVAL_S))
        elif (task := asyncio.current_task(loop)) is not None and task.get_name().isdecimal():
            outgoing.write(pipe.frame(pipe.Hung(id=int(task.get_name()))))
            os._exit(1)


def judged(call: int, value: Any, noun: str = NOUN) -> pipe.Answer:
    """Return the answer for a returned value: a finite real number, or an error that names the value."""
    if wrong := objection(value):
        return pipe.Answer(id=call, error=f"{noun} is {wrong}")
    return pipe.Answer(id=call, value=float(value))


def reason(error: BaseException, noun: str = NOUN) -> str:
    """Describe an exception in one line, with its place; for an exception group, its first member."""
    while isinstance(error, BaseExceptionGroup):
        error = cast(BaseExceptionGroup[BaseException], error).exceptions[0]
    return f"{noun} raised {type(error).__name__}: {error!s:.500}{place(error)}"


def place(error: BaseException) -> str:
    """Return ``, at FILE:LINE`` for the last line of the user's own code.

    If all of it is installed code, use the last line outside of staleflow; return "" if there is none.
    """
    lines = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    theirs = [(file, line) for file, line in lines if not file.startswith(OURS)]
    own = [(file, line) for file, line in theirs if not file.startswith(INSTALLED)] or theirs
    return f", at {Path(own[-1][0]).name}:{own[-1][1]}" if own else ""


def took_too_long(timeout_s: float, noun: str = NOUN) -> str:
    """Describe a call that exceeded its time limit."""
    return f"{noun} took longer than {timeout_s:g} s"


if __name__ == "__main__":
    sys.exit(main())
