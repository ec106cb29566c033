"""Read files without waiting for a file system that hangs.

A read from a network file system whose server is gone blocks in the kernel and cannot be cancelled. These functions
leave such a read to a daemon thread.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Generic, TypeVar

READ_TIMEOUT_S = 5.0
PATIENCE_S = 0.2
"""Seconds that a ``PatientReader`` waits for one read."""

T = TypeVar("T")


def within(timeout_s: float, read: Callable[[], T]) -> T:
    """Return ``read()``. Raise ``TimeoutError`` after ``timeout_s``; the thread that reads is then abandoned."""
    return _started(read).result(timeout_s)


class PatientReader(Generic[T]):
    """Repeat a read that may hang. At most one read is under way."""

    def __init__(self, read: Callable[[], T]) -> None:
        self._read = read
        self._pending: Future[T] | None = None

    def take(self) -> T | None:
        """Return what was read, or None while a read hangs. Only the first call of a hung read waits."""
        fresh = self._pending is None
        if self._pending is None:
            self._pending = _started(self._read)
        pending = self._pending
        if not fresh and not pending.done():
            return None
        wait((pending,), PATIENCE_S)
        if not pending.done():
            return None
        self._pending = None
        return pending.result()


def _started(read: Callable[[], T]) -> Future[T]:
    """Run ``read`` in a daemon thread, which the interpreter does not join at exit."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(read())
        except BaseException as error:  # the caller of result() raises it
            future.set_exception(error)

    threading.Thread(target=run, name="file read", daemon=True).start()
    return future
