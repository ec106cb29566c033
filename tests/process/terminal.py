"""A command in its own pseudo-terminal: read the screen as a user would see it, and press keys."""

import fcntl
import os
import pty
import select
import shlex
import signal
import struct
import subprocess
import sys
import termios
import time
from types import TracebackType

import pyte

from staleflow.cli.main import VERBS

LEAVES_S = 300.0
"""Time limit for a command to exit."""
SETTLED_S = 0.1
"""A frame is complete when nothing follows for this long; frames come every quarter of a second."""
PROMPT = "shell$"
ALTERNATE, MAIN = b"\x1b[?1049h", b"\x1b[?1049l"
"""Escape sequences that enter and leave the alternate screen."""


class Terminal:
    """``staleflow`` with these arguments in a terminal of ``columns`` x ``rows`` cells.

    With ``shell``, the command is typed into a bash that outlives it.
    """

    def __init__(
        self, *words: object, columns: int = 80, rows: int = 24, shell: bool = False, term: str = "xterm-256color"
    ) -> None:
        assert words[0] in VERBS
        command = [sys.executable, "-m", "staleflow.cli", *map(str, words)]
        self._screen = pyte.Screen(columns, rows)
        self._stream = pyte.ByteStream(self._screen)
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.modes = termios.tcgetattr(slave)
        """Terminal modes before the start of the command."""
        environment = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "COLUMNS", "LINES")}
        self.process = subprocess.Popen(
            ["bash", "--norc", "--noprofile", "--noediting", "-i"] if shell else command,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=environment | {"TERM": term, "PS1": f"{PROMPT} "},
            preexec_fn=own_terminal,
        )
        self._slave = slave
        self.written = b""
        if shell:
            self.until(PROMPT)
            self.press(f"{shlex.join(command)}\n")

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(LEAVES_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        os.close(self._slave)
        os.close(self._master)

    @property
    def lines(self) -> list[str]:
        """Lines of the current screen."""
        return [line.rstrip() for line in self._screen.display]

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    @property
    def modes_now(self) -> list[object]:
        return termios.tcgetattr(self._slave)

    def press(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def read(self, timeout_s: float) -> None:
        """Read output for at most ``timeout_s``."""
        ready, _, _ = select.select([self._master], [], [], timeout_s)
        if ready:
            chunk = os.read(self._master, 65536)
            self.written += chunk
            self._stream.feed(chunk)

    def until(self, words: str, timeout_s: float = 300.0) -> str:
        """Wait until the screen contains these words and its frame is complete; return the screen."""
        deadline = time.monotonic() + timeout_s
        while words not in self.text:
            assert time.monotonic() < deadline, f"{words!r} never came:\n{self.text}"
            assert self.process.poll() is None or words in self._rest(), f"it ended:\n{self.text}"
            self.read(0.05)
        while select.select([self._master], [], [], SETTLED_S)[0] and time.monotonic() < deadline:
            self.read(0)
        return self.text

    def until_gone(self, words: str, timeout_s: float = 300.0) -> None:
        """Wait until the screen does not contain these words any more."""
        deadline = time.monotonic() + timeout_s
        while words in self.text:
            assert time.monotonic() < deadline, f"{words!r} stays:\n{self.text}"
            assert self.process.poll() is None, f"it ended:\n{self.text}"
            self.read(0.05)

    def until_written(self, what: bytes, times: int, timeout_s: float = 300.0) -> None:
        """Wait until the command has written these bytes ``times`` times."""
        deadline = time.monotonic() + timeout_s
        while self.written.count(what) < times:
            assert time.monotonic() < deadline, f"{what!r} came {self.written.count(what)} times:\n{self.text}"
            self.read(0.05)

    def _rest(self) -> str:
        while select.select([self._master], [], [], 0.05)[0]:
            self.read(0)
        return self.text

    def ended(self) -> int:
        """Wait until the command exits without a signal; return its exit code."""
        deadline = time.monotonic() + LEAVES_S
        while self.process.poll() is None:
            assert time.monotonic() < deadline, f"it stays:\n{self.text}"
            self.read(0.05)
        while select.select([self._master], [], [], 0)[0]:
            self.read(0)
        return self.process.returncode


def own_terminal() -> None:
    """Runs in the child: deliver Ctrl-C and hangup of this terminal to it, also when the tests run under nohup."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
