"""Sources of snapshots: a running service, or the replay of a trace. Each can be polled at any time."""

import itertools
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from staleflow.configs.errors import ConfigError
from staleflow.metrics.reader import metric_lines
from staleflow.monitor.replay import Contradiction, TraceState
from staleflow.net.transport import SOCKETS, Transport
from staleflow.process.hung_files import PatientReader
from staleflow.protocols.wire.messages import ParametersStatus, SchedulerStatus
from staleflow.supervisor import summary
from staleflow.supervisor.view import Snapshot
from staleflow.supervisor.watch import NewLines, StatusWatch
from staleflow.trace.reader import Line, read_lines

TRACE = "trace.jsonl"
LIVE_INTERVAL_S = 1.0
"""Seconds between two status requests to the scheduler."""


class Source(Protocol):
    """Source of the snapshots that ``top`` shows."""

    name: str
    trace: Path | None
    """Trace for stories; None if it cannot be reached."""

    def __enter__(self) -> "Source": ...
    def __exit__(self, *_: object) -> None: ...
    def snapshot(self) -> Snapshot:
        """Return the current state."""
        ...


class Live:
    """A running service; one thread polls its scheduler and another its parameter server.

    Curves and stories come from the run directory if it can be read here, whether the user or the scheduler named it.
    """

    def __init__(self, address: str, run_dir: Path | None = None, *, transport: Transport = SOCKETS) -> None:
        self.address = address
        self.name = run_dir.resolve().name if run_dir is not None else address
        self.trace: Path | None = None
        self._transport = transport
        self._watch = StatusWatch(SchedulerStatus, address, LIVE_INTERVAL_S, transport=transport)
        self._parameters: StatusWatch[ParametersStatus] | None = None
        self._lines: PatientReader[tuple[Mapping[str, Any], ...]] | None = None
        self._summary: PatientReader[summary.Summary | None] | None = None
        self._identified = False
        self._ended_s: float | None = None
        """Running time at the end of the run."""
        if run_dir is not None:
            self._open_files(run_dir)

    def __enter__(self) -> "Live":
        self._watch.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._watch.__exit__()
        if self._parameters is not None:
            self._parameters.__exit__()

    @property
    def answered(self) -> bool:
        """True once the scheduler has answered."""
        return self._watch.newest is not None

    @property
    def silent_s(self) -> float:
        """Seconds since the scheduler's last answer."""
        return self._watch.age_s

    @property
    def complete(self) -> bool:
        """True once the parameter server has answered, too."""
        return self._parameters is not None and self._parameters.newest is not None

    def snapshot(self) -> Snapshot:
        status = self._watch.newest or SchedulerStatus()
        if status.answered and not self._identified:
            self._identify(status)
        self._watch_parameters(status.parameters)
        end = self._end()
        phase, ended = end or (phase_of(status, self.silent_s) if status.answered else "no answer yet", "")
        return Snapshot(
            phase=phase,
            ended=ended,
            elapsed_s=self._elapsed_s(status, over=end is not None or phase == "finished"),
            status=status,
            status_age_s=self.silent_s,
            lines=(self._lines.take() if self._lines is not None else None) or (),
            parameters=(self._parameters and self._parameters.newest) or ParametersStatus(),
            unix_s=time.time(),
        )

    def _end(self) -> tuple[str, str] | None:
        """Return the outcome of a run whose scheduler has stopped answering, with a sentence; None if unknown."""
        if self.trace is None or self._summary is None or self.silent_s <= 3 * LIVE_INTERVAL_S:
            return None
        folder = self.trace.parent
        if (ended_run := self._summary.take()) is None:
            return None
        steps = f"{ended_run.steps:,} of {ended_run.steps_wanted:,} steps"
        return ended_run.outcome, f"the run has ended: {ended_run.outcome}, {steps}; details: staleflow report {folder}"

    def _elapsed_s(self, status: SchedulerStatus, *, over: bool) -> float:
        """Return the running time of the run. It stops with the run, and counts on while the scheduler is silent."""
        if not over:
            self._ended_s = None
            return status.run_s + self.silent_s
        self._ended_s = status.run_s if self._ended_s is None else self._ended_s
        return self._ended_s

    def _identify(self, status: SchedulerStatus) -> None:
        """Take the name and the directory of the run from the first reply."""
        self._identified = True
        run_dir = Path(status.run_dir)
        if self.trace is None and status.run_dir:
            self.name = run_dir.name
            if (run_dir / TRACE).is_file():
                self._open_files(run_dir)

    def _open_files(self, run_dir: Path) -> None:
        self.trace = run_dir / TRACE
        self._lines = PatientReader(NewLines(run_dir / "metrics.jsonl").take)
        self._summary = PatientReader(lambda: summary.read(run_dir))

    def _watch_parameters(self, endpoint: str) -> None:
        """Start polling the parameter server once the scheduler has reported its address."""
        if self._parameters is None and endpoint:
            self._parameters = StatusWatch(ParametersStatus, endpoint, 2 * LIVE_INTERVAL_S, transport=self._transport)
            self._parameters.__enter__()


def phase_of(status: SchedulerStatus, age_s: float = 0.0) -> str:
    """Return the phase of a run in a few words, from a status that is ``age_s`` old."""
    if age_s > 3 * LIVE_INTERVAL_S:
        return "no answer"
    if status.error:
        return "failed"
    if outcome := summary.ended(status):
        return outcome
    if status.drained:
        return "draining"
    if status.closed:
        return "finished"
    return "running" if status.version >= 0 else "starting"


class Replay:
    """Replay of a trace at any speed. Seeking back reads the trace again from the beginning."""

    def __init__(self, trace: Path, steps: int = 0) -> None:
        """``steps``: number of steps of the whole run; 0 if unknown."""
        self.name = trace.parent.resolve().name
        self.trace: Path | None = trace
        self.over = False
        """True once the last line has been read."""
        self._steps = steps
        self._metrics = _by_time(trace.parent / "metrics.jsonl")
        self._rewind()

    def __enter__(self) -> "Replay":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    @property
    def at_s(self) -> float:
        """Seconds since the first event."""
        return self._at_s

    def _rewind(self) -> None:
        self._state = TraceState(self._steps)
        self._lines: Iterator[Line] = read_lines(self.trace) if self.trace else iter(())
        self._number = 1
        """Number of the next line."""
        self._next = next(self._lines, None)
        self._at_s = 0.0
        self._unix_s = 0.0 if self._next is None else self._next.t / 1e9
        self._num_lines = 0
        self.over = self._next is None

    def advance(self, seconds: float) -> None:
        """Move by ``seconds`` of the run's own time; negative values move back."""
        target_s = max(self._at_s + seconds, 0.0)
        if seconds < 0:
            self._rewind()
        while self._next is not None and self._state.at_s(self._next) <= target_s:
            self._unix_s = self._next.t / 1e9
            self._feed(self._next)
            self._number += 1
            self._next = next(self._lines, None)
        self.over = self._next is None
        self._at_s = self._state.now_s if self.over else target_s

    def _feed(self, line: Line) -> None:
        try:
            self._state.feed(line)
        except Contradiction as error:
            allowed = f"line {self._number}: {error}; staleflow trace check lists all problems"
            raise ConfigError("trace", str(self.trace), allowed) from error

    @property
    def until_next_s(self) -> float:
        """Seconds of the run's own time until the next event; 0 at the end."""
        return 0.0 if self._next is None else max(self._state.at_s(self._next) - self._at_s, 0.0)

    def to_the_end(self) -> None:
        """Move to the end of the trace."""
        self.advance(float("inf"))

    def snapshot(self) -> Snapshot:
        unix_s = self._unix_s + max(self._at_s - self._state.now_s, 0.0)
        fresh = tuple(
            itertools.takewhile(lambda line: float(line.get("t") or 0.0) <= unix_s, self._metrics[self._num_lines :])
        )
        self._num_lines += len(fresh)
        return Snapshot(
            phase="replay, the end" if self.over else "replay",
            elapsed_s=self._at_s,
            status=self._state.status(),
            lines=fresh,
            unix_s=unix_s,
        )


def _by_time(metrics: Path) -> list[Mapping[str, Any]]:
    """Return the lines of ``metrics.jsonl`` by time; none if the file does not exist."""
    return sorted(metric_lines(metrics), key=lambda line: float(line.get("t") or 0.0))
