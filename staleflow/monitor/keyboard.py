"""Single keys from a terminal, without waiting for a line; and what Ctrl-Z and ``fg`` take away and give back."""

import contextlib
import os
import select
import signal
import sys
import termios
import threading
import time
import tty
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, TextIO

SEQUENCES = {
    b"\x1b[A": "up",
    b"\x1b[B": "down",
    b"\x1b[C": "right",
    b"\x1b[D": "left",
    b"\x1bOA": "up",
    b"\x1bOB": "down",
    b"\x1bOC": "right",
    b"\x1bOD": "left",
    b"\x1b[5~": "pageup",
    b"\x1b[6~": "pagedown",
    b"\x1b[H": "home",
    b"\x1b[F": "end",
    b"\x1b[1~": "home",
    b"\x1b[4~": "end",
    b"\x1b[Z": "backtab",
}
SINGLE = {
    b"\r": "enter",
    b"\n": "enter",
    b"\x1b": "escape",
    b"\x7f": "backspace",
    b"\x08": "backspace",
    b"\t": "tab",
    b"\x03": "interrupt",
}
MOST = 256
"""Bytes that are read at once: more than anybody types between two looks."""


SIGNALS = (signal.SIGTSTP, signal.SIGCONT)
LOCAL_MODES = 3
"""Place of the local modes in what ``tcgetattr`` returns."""


class Keyboard:
    """Keys while it is entered; the terminal is as before afterwards. Without a terminal there never is a key.

    A job in the background leaves the terminal alone, whoever has it now: it would be stopped otherwise. Ctrl-Z stops
    the process inside ``read``, with the terminal and the screen given back; ``read`` takes them again after ``fg``.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        stream = stream or sys.stdin
        self._fd = stream.fileno() if stream is not None and stream.isatty() else -1
        self._before: Any = None
        self._handlers: dict[signal.Signals, Any] = {}
        self._wakes: tuple[int, int] | None = None
        """A pipe: a signal must not wait until a key comes."""
        self._asked = False
        """To stop."""
        self._leave: Callable[[], None] = _nothing
        self._again: Callable[[], None] = _nothing
        self.away = False
        """It was stopped, and the terminal is still somebody else's: nothing may be drawn."""

    @property
    def there(self) -> bool:
        """Whether there is a terminal to type at."""
        return self._fd >= 0

    def around_a_stop(self, leave: Callable[[], None], again: Callable[[], None]) -> None:
        """``leave`` gives the screen back before the process stops; ``again`` takes it once the terminal is its own."""
        self._leave, self._again = leave, again

    def __enter__(self) -> "Keyboard":
        if self.there and threading.current_thread() is threading.main_thread():
            self._listen()
        self._take()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._restore()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}
        wakes, self._wakes = self._wakes, None
        for end in wakes or ():
            os.close(end)

    def _listen(self) -> None:
        if signal.getsignal(signal.SIGTSTP) is signal.SIG_IGN:  # whoever started this process wants it so
            return
        self._wakes = os.pipe()
        for end in self._wakes:
            os.set_blocking(end, False)
        self._handlers = {number: signal.signal(number, self._on_signal) for number in SIGNALS}

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._asked = self._asked or number == signal.SIGTSTP
        if self._wakes is not None:
            with contextlib.suppress(BlockingIOError):  # it is awake then
                os.write(self._wakes[1], b"!")

    def _restore(self) -> None:
        if self._before is not None and self._in_front():
            termios.tcsetattr(self._fd, termios.TCSADRAIN, self._before)
        self._before = None

    def _stop(self) -> None:
        """As Ctrl-Z does by itself, but for the state of the terminal; returns when somebody continues the process."""
        self._asked = False
        if not self.away:
            self._leave()
        self._restore()
        self.away = True
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        signal.pthread_kill(threading.get_ident(), signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, self._on_signal)

    def _in_front(self) -> bool:
        """The terminal's keys are for this process."""
        try:
            return self.there and os.tcgetpgrp(self._fd) == os.getpgrp()
        except OSError:
            return False

    def _take(self) -> bool:
        """Keys come one by one from now on, if they come here at all. A shell takes that back while we are stopped."""
        if not self._in_front():
            return False
        try:
            modes = termios.tcgetattr(self._fd)
            if self._before is None or modes[LOCAL_MODES] & termios.ICANON:
                self._before = modes
                tty.setcbreak(self._fd, termios.TCSADRAIN)
        except termios.error:  # the terminal is gone
            return False
        if self.away:
            self.away = False
            self._again()
        return True

    def read(self, timeout_s: float) -> list[str]:
        """What was pressed, at the latest after ``timeout_s``; empty then, and after a stop."""
        timeout_s = max(timeout_s, 0.0)
        if self._asked:
            self._stop()
        if not self._take():
            time.sleep(timeout_s)
            return []
        woken = [] if self._wakes is None else [self._wakes[0]]
        try:
            ready, _, _ = select.select([self._fd, *woken], [], [], timeout_s)
            pressed = os.read(self._fd, MOST) if self._fd in ready else b""
            for end in woken:
                if end in ready:
                    os.read(end, MOST)
        except OSError:
            return []
        if self._asked:
            self._stop()
            self._take()
        return parse(pressed)


def _nothing() -> None:
    """Where there is no screen."""


def parse(pressed: bytes) -> list[str]:
    """Names of keys, and characters as they are; what is neither is left out."""
    keys: list[str] = []
    while pressed:
        for sequence, name in SEQUENCES.items():
            if pressed.startswith(sequence):
                keys.append(name)
                pressed = pressed[len(sequence) :]
                break
        else:
            if pressed[:1] == b"\x1b" and len(pressed) > 2 and pressed[1:2] in (b"[", b"O"):
                pressed = _after_unknown(pressed)
                continue
            length = _length(pressed[0])
            character, pressed = pressed[:length], pressed[length:]
            name = SINGLE.get(character) or character.decode(errors="ignore")
            if name and (name in SINGLE.values() or name.isprintable()):
                keys.append(name)
    return keys


def _after_unknown(pressed: bytes) -> bytes:
    """What follows a sequence of a key that has no name here: it ends with a letter or ``~``."""
    for index in range(2, len(pressed)):
        if 0x40 <= pressed[index] <= 0x7E:
            return pressed[index + 1 :]
    return b""


def _length(first: int) -> int:
    """Bytes of a character of UTF-8 that begins so."""
    return 1 if first < 0xC0 else 2 if first < 0xE0 else 3 if first < 0xF0 else 4
