"""Single keys from a terminal, without waiting for a line."""

import os
import select
import sys
import termios
import time
import tty
from types import TracebackType
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


class Keyboard:
    """Keys while it is entered; the terminal is as before afterwards. Without a terminal there never is a key.

    A job in the background leaves the terminal alone, whoever has it now: it would be stopped otherwise.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        stream = stream or sys.stdin
        self._fd = stream.fileno() if stream is not None and stream.isatty() else -1
        self._before: Any = None

    @property
    def there(self) -> bool:
        """Whether there is a terminal to type at."""
        return self._fd >= 0

    def __enter__(self) -> "Keyboard":
        self._take()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if self._before is not None and self._in_front():
            termios.tcsetattr(self._fd, termios.TCSADRAIN, self._before)
        self._before = None

    def _in_front(self) -> bool:
        """The terminal's keys are for this process."""
        try:
            return self.there and os.tcgetpgrp(self._fd) == os.getpgrp()
        except OSError:
            return False

    def _take(self) -> bool:
        """Keys come one by one from now on, if they come here at all."""
        if not self._in_front():
            self._before = None
            return False
        if self._before is None:
            self._before = termios.tcgetattr(self._fd)
            tty.setcbreak(self._fd, termios.TCSADRAIN)
        return True

    def read(self, timeout_s: float) -> list[str]:
        """What was pressed, at the latest after ``timeout_s``; empty then."""
        timeout_s = max(timeout_s, 0.0)
        if not self._take():
            time.sleep(timeout_s)
            return []
        try:
            ready, _, _ = select.select([self._fd], [], [], timeout_s)
            pressed = os.read(self._fd, MOST) if ready else b""
        except OSError:
            return []
        return parse(pressed)


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
