"""Ctrl-C, SIGTERM and SIGHUP as a flag: seen at every wait, raised nowhere in the middle of something."""

import signal
import threading
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""The last when a terminal is closed or a connection ends; ``nohup`` has it ignored, and so do we then."""


class Interrupted(Exception):
    """Somebody wants the run to end."""


class StopSignals:
    """While inside, the first signal sets ``first`` and any other ``second``.

    Signals come to the main thread: in any other nothing is changed, and nobody asks this way.
    """

    def __init__(self) -> None:
        self.first = threading.Event()
        self.second = threading.Event()
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            heard = [number for number in SIGNALS if not _ignored(number)]
            self._before = {number: signal.signal(number, self._on_signal) for number in heard}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def wait(self, seconds: float) -> bool:
        """True at once when a signal came, else False after ``seconds``."""
        return self.first.wait(seconds)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        (self.second if self.first.is_set() else self.first).set()


def _ignored(number: signal.Signals) -> bool:
    return number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN
