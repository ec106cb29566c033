"""Read single keys from a terminal in cbreak mode, with support for Ctrl-Z and ``fg``."""

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
MAX_READ_BYTES = 256
"""Maximum bytes per read, more than a user types between two reads."""


SIGNALS = (signal.SIGTSTP, signal.SIGCONT)
LOCAL_MODES = 3
"""Index of the local modes in the result of ``tcgetattr``."""


class Keyboard:
    """Context manager that reads keys and restores the terminal at its end. Without a terminal it returns no keys.

    A background job must not touch the terminal: the kernel would stop it. Ctrl-Z suspends the process inside ``read``,
    after terminal and screen have been restored; ``read`` takes them back after ``fg``.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        stream = stream or sys.stdin
        self._fd = stream.fileno() if stream is not None and stream.isatty() else -1
        self._before: Any = None
        self._handlers: dict[signal.Signals, Any] = {}
        self._wakes: tuple[int, int] | None = None
        """Self-pipe that wakes ``select`` when a signal arrives."""
        self._stop_requested = False
        """True after Ctrl-Z, until the process has been suspended."""
        self._leave: Callable[[], None] = _nothing
        self._resume: Callable[[], None] = _nothing
        self.away = False
        """True after a suspension while another job owns the terminal: nothing may be drawn."""

    @property
    def is_terminal(self) -> bool:
        """True if there is a terminal."""
        return self._fd >= 0

    def on_suspend(self, leave: Callable[[], None], resume: Callable[[], None]) -> None:
        """Register ``leave`` to restore the screen before a suspension, and ``resume`` to take it back afterwards."""
        self._leave, self._resume = leave, resume

    def __enter__(self) -> "Keyboard":
        if self.is_terminal and threading.current_thread() is threading.main_thread():
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
        if signal.getsignal(signal.SIGTSTP) is signal.SIG_IGN:  # the parent has disabled job control
            return
        self._wakes = os.pipe()
        for end in self._wakes:
            os.set_blocking(end, False)
        self._handlers = {number: signal.signal(number, self._on_signal) for number in SIGNALS}

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._stop_requested = self._stop_requested or number == signal.SIGTSTP
        if self._wakes is not None:
            with contextlib.suppress(BlockingIOError):  # the pipe is full, so the reader wakes up anyway
                os.write(self._wakes[1], b"!")

    def _restore(self) -> None:
        if self._before is not None and self._in_front():
            termios.tcsetattr(self._fd, termios.TCSADRAIN, self._before)
        self._before = None

    def _stop(self) -> None:
        """Suspend the process like the default action of SIGTSTP, with the terminal restored; return after ``fg``."""
        self._stop_requested = False
        if not self.away:
            self._leave()
        self._restore()
        self.away = True
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        signal.pthread_kill(threading.get_ident(), signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, self._on_signal)

    def _in_front(self) -> bool:
        """Return whether this process is in the foreground and receives the terminal's keys."""
        try:
            return self.is_terminal and os.tcgetpgrp(self._fd) == os.getpgrp()
        except OSError:
            return False

    def _take(self) -> bool:
        """Switch to cbreak mode if in the foreground. Shells reset the mode while the process is suspended."""
        if not self._in_front():
            return False
        try:
            modes = termios.tcgetattr(self._fd)
            if self._before is None or modes[LOCAL_MODES] & termios.ICANON:
                self._before = modes
                tty.setcbreak(self._fd, termios.TCSADRAIN)
        except termios.error:  # the terminal was closed
            return False
        if self.away:
            self.away = False
            self._resume()
        return True

    def read(self, timeout_s: float) -> list[str]:
        """Return the pressed keys after at most ``timeout_s``; empty on a timeout and after a suspension."""
        timeout_s = max(timeout_s, 0.0)
        if self._stop_requested:
            self._stop()
        if not self._take():
            time.sleep(timeout_s)
            return []
        woken = [] if self._wakes is None else [self._wakes[0]]
        try:
            ready, _, _ = select.select([self._fd, *woken], [], [], timeout_s)
            pressed = os.read(self._fd, MAX_READ_BYTES) if self._fd in ready else b""
            for end in woken:
                if end in ready:
                    os.read(end, MAX_READ_BYTES)
        except OSError:
            return []
        if self._stop_requested:
            self._stop()
            self._take()
        return parse(pressed)


def _nothing() -> None:
    """Default callback without a screen."""


def parse(pressed: bytes) -> list[str]:
    """Return the names of special keys and all printable characters; unknown sequences are dropped."""
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
    """Return the bytes after an unknown escape sequence, which ends with a letter or ``~``."""
    for index in range(2, len(pressed)):
        if 0x40 <= pressed[index] <= 0x7E:
            return pressed[index + 1 :]
    return b""


def _length(first: int) -> int:
    """Return the length of a UTF-8 character from its first byte."""
    return 1 if first < 0xC0 else 2 if first < 0xE0 else 3 if first < 0xF0 else 4
