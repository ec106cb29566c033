"""Ctrl-C, SIGTERM and SIGHUP as events that every wait checks, instead of an exception at an arbitrary point."""

import signal
import threading
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""SIGHUP arrives when a terminal closes or a connection ends. It stays ignored where ``nohup`` ignores it."""


class Interrupted(Exception):
    """A signal requested the end of the run."""


class StopSignals:
    """Context manager in which the first signal sets ``first`` and every further one sets ``second``.

    Python runs signal handlers in the main thread only, so in any other thread this changes nothing.
    """

    def __init__(self) -> None:
        self.first = threading.Event()
        self.second = threading.Event()
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            handled = [number for number in SIGNALS if not _ignored(number)]
            self._before = {number: signal.signal(number, self._on_signal) for number in handled}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def wait(self, seconds: float) -> bool:
        """Return True as soon as a signal arrived, or False after ``seconds``."""
        return self.first.wait(seconds)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        (self.second if self.first.is_set() else self.first).set()


def _ignored(number: signal.Signals) -> bool:
    return number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN
