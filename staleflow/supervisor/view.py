"""What the supervisor tells whoever looks on: a terminal, a log, a test."""

import contextlib
import errno
import termios
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from staleflow.process.sanitize import all_printable
from staleflow.supervisor.summary import Summary


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessState:
    """One process of the run, as a person should see it."""

    name: str
    kind: str
    state: str
    """starting, running, waiting to restart, ended."""
    pid: int | None = None
    restarts: int = 0
    doing: str = ""
    """How far it is with its loading, where it says so."""
    attaches: bool = True
    """It joins the run itself, and loads until then; else it serves, builds, or looks after a machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The whole run at one moment, as a terminal may show it: what peers and files said is printable here."""

    phase: str
    """One word or a few: building the model, starting, training, draining."""
    elapsed_s: float
    processes: tuple[ProcessState, ...] = ()
    status: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The scheduler's last answer to ``GetStatus``; empty before the first."""
    status_age_s: float = 0.0
    lines: tuple[Mapping[str, Any], ...] = ()
    """What ``metrics.jsonl`` has gained since the snapshot before: every step, however fast they are."""
    detail: str = ""
    """Of the phase: the last line that the model's builder printed."""
    ended: str = ""
    """How the run came to its end, in a sentence; empty while it has not, and where that is not known."""
    parameters: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The parameter server's last answer to ``GetStatus``; empty where nobody asked."""
    unix_s: float = 0.0
    """The time of day, to tell how long ago events were; 0: not known."""

    def __post_init__(self) -> None:
        for name in ("status", "lines", "parameters", "detail", "ended"):
            object.__setattr__(self, name, all_printable(getattr(self, name)))


class View(Protocol):
    """Called from one thread: ``start``, then ``show`` some times a second, then ``stop``; ``summary`` comes last."""

    def start(self) -> None: ...
    def show(self, snapshot: Snapshot) -> None: ...
    def say(self, text: str) -> None:
        """Something happened that a person must know; stays on screen."""
        ...

    def stop(self) -> None: ...
    def summary(self, summary: Summary) -> None: ...


NOBODY = (errno.EIO, errno.EPIPE, errno.ENOSPC, errno.EDQUOT)
"""Errors of a terminal that is gone, or of a file that cannot grow: there is nobody to tell them to."""


class Undisturbed:
    """A view whose terminal may be gone, or the disk of whose file full: nobody is told then, and nothing else changes.

    Nor does it when the view cannot show something, which is said once.
    """

    def __init__(self, view: View) -> None:
        self._view = view
        self._failed = False

    def start(self) -> None:
        with _gone():
            self._view.start()

    def show(self, snapshot: Snapshot) -> None:
        try:
            self._view.show(snapshot)
        except Exception as error:  # boundary: whoever looks on does not end a run
            if not self._failed and not _is_gone(error):
                self._failed = True
                self.say(f"what is shown here failed, the run goes on: {type(error).__name__}: {error}")

    def say(self, text: str) -> None:
        with _gone():
            self._view.say(text)

    def stop(self) -> None:
        with _gone():
            self._view.stop()

    def summary(self, summary: Summary) -> None:
        with _gone():
            self._view.summary(summary)


def _is_gone(error: Exception) -> bool:
    return isinstance(error, termios.error) or (isinstance(error, OSError) and error.errno in NOBODY)


def _gone() -> contextlib.suppress:
    return contextlib.suppress(OSError, termios.error)
