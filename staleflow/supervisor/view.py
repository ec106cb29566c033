"""What the supervisor tells whoever looks on: a terminal, a log, a test."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The whole run at one moment."""

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
    parameters: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The parameter server's last answer to ``GetStatus``; empty where nobody asked."""
    unix_s: float = 0.0
    """The time of day, to tell how long ago events were; 0: not known."""


class View(Protocol):
    """Called from one thread: ``start``, then ``show`` some times a second, then ``stop``; ``summary`` comes last."""

    def start(self) -> None: ...
    def show(self, snapshot: Snapshot) -> None: ...
    def say(self, text: str) -> None:
        """Something happened that a person must know; stays on screen."""
        ...

    def stop(self) -> None: ...
    def summary(self, summary: Summary) -> None: ...
