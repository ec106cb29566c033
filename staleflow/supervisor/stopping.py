"""Ctrl-C and SIGTERM as a flag: seen at every wait, raised nowhere in the middle of something."""

import signal
import threading
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


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
            self._before = {number: signal.signal(number, self._on_signal) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def wait(self, seconds: float) -> bool:
        """True at once when a signal came, else False after ``seconds``."""
        return self.first.wait(seconds)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        (self.second if self.first.is_set() else self.first).set()
