"""Record of the running call of a process, readable by the parent after the process has died.

Calls that share a process die together, and only one of them is to blame. While a step of a task runs, the number of
its call is in a page of memory that parent and child share; a step that ends the process leaves it there. Tasks that
user code starts inherit the number with their context. Threads have no number: while other threads run, the crash may
be theirs, and the mark has a flag for that.
"""

import asyncio
import mmap
import os
import struct
import threading
from collections.abc import Coroutine, Generator
from contextvars import ContextVar
from typing import Any

_PLACE = struct.Struct("<q?")
_call: ContextVar[int] = ContextVar("call", default=0)
"""Number of the call that a task works for; 0: none."""


def allocate() -> tuple[int, mmap.mmap]:
    """Allocate a page for both processes; return its descriptor, for the child, and the parent's map of it."""
    descriptor = os.memfd_create("mark")
    os.ftruncate(descriptor, mmap.PAGESIZE)
    return descriptor, mmap.mmap(descriptor, mmap.PAGESIZE, prot=mmap.PROT_READ)


def read(page: mmap.mmap) -> tuple[int, bool]:
    """Return the call whose step ended the process (0: unknown), and whether other threads may have ended it."""
    number, threads = _PLACE.unpack_from(page)
    return number, threads


class Marker:
    """The child's side. Call ``install`` once all threads of staleflow run: any further thread is the user's."""

    def __init__(self, descriptor: int) -> None:
        self._page = mmap.mmap(descriptor, mmap.PAGESIZE)
        os.close(descriptor)
        self._threads = 0

    def install(self, loop: asyncio.AbstractEventLoop) -> None:
        """Mark every step of every task of the loop."""
        self._threads = threading.active_count()

        def factory(loop: asyncio.AbstractEventLoop, coro: Any, **more: Any) -> "asyncio.Task[Any]":
            return asyncio.Task(_Marked(coro, self), loop=loop, **more)

        loop.set_task_factory(factory)

    def begin(self) -> None:
        """Mark the start of a step."""
        if number := _call.get():
            _PLACE.pack_into(self._page, 0, number, threading.active_count() > self._threads)

    def end(self) -> None:
        """Mark the end of a step."""
        _PLACE.pack_into(self._page, 0, 0, False)


def works_for(call: int) -> None:
    """Assign this task, and those that it starts from now on, to a call."""
    _call.set(call)


class _Marked(Coroutine[Any, Any, Any]):
    """A coroutine whose every step is marked."""

    __slots__ = ("_coro", "_marker")

    def __init__(self, coro: Coroutine[Any, Any, Any], marker: Marker) -> None:
        self._coro = coro
        self._marker = marker

    def send(self, value: Any) -> Any:
        self._marker.begin()
        try:
            return self._coro.send(value)
        finally:
            self._marker.end()

    def throw(self, *error: Any) -> Any:
        self._marker.begin()
        try:
            return self._coro.throw(*error)
        finally:
            self._marker.end()

    def close(self) -> None:
        self._coro.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        return (yield from self._coro.__await__())
