"""Interface between the supervisor and its views: the live screen, plain text, and metric writers."""

import contextlib
import errno
import termios
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from staleflow.process.sanitize import all_printable
from staleflow.protocols.wire.messages import ParametersStatus, SchedulerStatus
from staleflow.supervisor.summary import Summary


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessState:
    """One process of the run, as shown to the user."""

    name: str
    kind: str
    state: str
    """One of not started, running, waiting to restart, ended."""
    pid: int | None = None
    restarts: int = 0
    doing: str = ""
    """Loading progress, if the process prints any."""
    attaches: bool = True
    """True for workers, which load first and then attach to the run; False for servers, builders and launchers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """State of the whole run at one moment. Text from peers and files is sanitized, so a terminal may print it."""

    phase: str
    """Short description: building the model, starting, training, draining."""
    elapsed_s: float
    processes: tuple[ProcessState, ...] = ()
    status: SchedulerStatus = field(default_factory=SchedulerStatus)
    """Last reply of the scheduler to ``GetStatus``; the default before the first."""
    status_age_s: float = 0.0
    lines: tuple[Mapping[str, Any], ...] = ()
    """Lines appended to ``metrics.jsonl`` since the previous snapshot, so that no step is skipped."""
    detail: str = ""
    """Detail of the phase: the last line that the model builder printed."""
    ended: str = ""
    """Sentence on how the run ended; empty while it runs and if unknown."""
    parameters: ParametersStatus = field(default_factory=ParametersStatus)
    """Last reply of the parameter server to ``GetStatus``; the default if it is not polled."""
    unix_s: float = 0.0
    """Unix time of the snapshot, for the age of events; 0 if unknown."""

    def __post_init__(self) -> None:
        for name in ("status", "lines", "parameters", "detail", "ended"):
            object.__setattr__(self, name, all_printable(getattr(self, name)))


class View(Protocol):
    """Called from one thread: ``start``, then ``show`` some times a second, then ``stop``; ``summary`` comes last."""

    def start(self) -> None: ...
    def show(self, snapshot: Snapshot) -> None: ...
    def notify(self, text: str) -> None:
        """Report an event that the user must know; the text stays on screen."""
        ...

    def stop(self) -> None: ...
    def summary(self, summary: Summary) -> None: ...


TERMINAL_GONE_ERRNOS = (errno.EIO, errno.EPIPE, errno.ENOSPC, errno.EDQUOT)
"""Errors of a closed terminal or of a full disk below a redirected stdout; they cannot be reported anywhere."""


class SafeView:
    """Wrapper that protects a run from errors of its view.

    Errors of a closed terminal or a full disk are ignored. Any other exception of ``show`` is reported once.
    """

    def __init__(self, view: View) -> None:
        self._view = view
        self._failed = False

    def start(self) -> None:
        with _ignoring_lost_terminal():
            self._view.start()

    def show(self, snapshot: Snapshot) -> None:
        try:
            self._view.show(snapshot)
        except Exception as error:  # boundary: a broken view must not end the run
            if not self._failed and not _is_lost_terminal(error):
                self._failed = True
                self.notify(f"the display failed, the run continues: {type(error).__name__}: {error}")

    def notify(self, text: str) -> None:
        with _ignoring_lost_terminal():
            self._view.notify(text)

    def stop(self) -> None:
        with _ignoring_lost_terminal():
            self._view.stop()

    def summary(self, summary: Summary) -> None:
        with _ignoring_lost_terminal():
            self._view.summary(summary)


def _is_lost_terminal(error: Exception) -> bool:
    return isinstance(error, termios.error) or (isinstance(error, OSError) and error.errno in TERMINAL_GONE_ERRNOS)


def _ignoring_lost_terminal() -> contextlib.suppress:
    return contextlib.suppress(OSError, termios.error)
