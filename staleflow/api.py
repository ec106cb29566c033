"""Python API for runs and traces, for scripts, notebooks and tests.

Nothing here belongs to an event loop, so all of it works where one is running already.
"""

import re
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import msgspec

from staleflow.clients.admin import Admin
from staleflow.configs.errors import ConfigError
from staleflow.configs.loading.load import addresses, from_json, load, model_dir, read_run
from staleflow.configs.loading.presence import present
from staleflow.configs.loading.probe import count_gpus
from staleflow.configs.schema import Config
from staleflow.metrics.reader import metric_lines
from staleflow.monitor.sources import phase_of
from staleflow.monitor.story import events_about
from staleflow.net.permissions import Role
from staleflow.net.security import OBSERVER_ROLES, client_sockets
from staleflow.process.sanitize import printable
from staleflow.protocols.wire.messages.status import as_dict
from staleflow.report.writers import with_writers
from staleflow.supervisor import rundir, summary
from staleflow.supervisor.addresses import check_free, may_answer
from staleflow.supervisor.joining import generated_name
from staleflow.supervisor.mirror import check_access
from staleflow.supervisor.supervisor import Supervisor
from staleflow.supervisor.view import Snapshot, View
from staleflow.trace.audit.report import AuditReport, audit
from staleflow.trace.reader import read_events, read_lines, typed

if TYPE_CHECKING:
    from staleflow.clients.trainer.client import TrainerClient

TRACE = "trace.jsonl"
POLL_INTERVAL_S = 0.1
"""Seconds between two checks whether a worker has attached to the run."""
LAST_LINE_S = 1.0
"""Seconds to read the last line of a process that has ended; a process that it started may keep the pipe open."""


def run(
    config: Config | Path | str,
    *overrides: str,
    run_dir: Path | str | None = None,
    resume: bool = False,
    progress: bool = True,
) -> "Result":
    """Start every role of a configuration on this machine and train; return when all processes have ended.

    ``config``: a file, or the result of ``load``. ``overrides``: ``"trainer.steps=4"``, as on the command line.
    ``run_dir``: default ``runs/NAME-TIMESTAMP``. ``resume``: continue there; a finished run is unchanged.
    ``progress``: print a line every few seconds.
    An interrupt (Ctrl-C, a notebook's stop button) stops the run, and is the result's ``outcome``.

    Raise ``ConfigError`` for an invalid configuration before any process starts.
    """
    if isinstance(config, Config):
        if overrides:
            raise ConfigError(
                "override", overrides[0], "a configuration that is loaded does not change: load(file, ...)"
            )
        chosen = config
    else:
        chosen = load(config, overrides)
    with _argument_names():
        folder = rundir.choose(chosen, None if run_dir is None else Path(run_dir), resume=resume)
    if resume and (finished := summary.finished(folder, chosen.trainer.steps)) is not None:
        if progress:
            sys.stdout.write(f"{summary.how_to_continue(finished, chosen)}\n")
        return Result(folder)
    present(chosen)
    if not resume:  # a run that has begun continues without its mirror
        check_access(chosen)
    check_free(chosen, folder)
    view = with_writers(_view(chosen, folder, progress), chosen, folder)
    command = f"staleflow.run(..., run_dir={str(folder)!r}, resume=True)"
    with _argument_names(), rundir.claim(chosen, folder, resume=resume, command=command):
        Supervisor(chosen, folder, view, command, gpus=count_gpus()).run()
    return Result(folder)


@contextmanager
def _argument_names() -> Generator[None]:
    """Rewrite command-line option names in errors as argument names of this API."""
    try:
        yield
    except ConfigError as error:
        what, allowed = (re.sub(r"--run-dir\b", "run_dir", text) for text in (error.what, error.allowed))
        what, allowed = what.replace("--resume", "resume"), allowed.replace("--resume", "resume=True")
        if (what, allowed) == (error.what, error.allowed):
            raise
        raise ConfigError(what, error.value, allowed) from None


def _view(config: Config, folder: Path, progress: bool) -> View:
    from staleflow.monitor.plain import PlainView

    return PlainView(sys.stdout, config.name, run_dir=folder) if progress else _SilentView()


class _SilentView:
    """View that prints nothing."""

    def start(self) -> None: ...
    def show(self, snapshot: Snapshot) -> None: ...
    def notify(self, text: str) -> None: ...
    def stop(self) -> None: ...
    def summary(self, summary: summary.Summary) -> None: ...


@dataclass(frozen=True)
class Result:
    """A run that has ended, identified by its directory."""

    run_dir: Path

    @cached_property
    def summary(self) -> summary.Summary:
        """Content of ``summary.json``: outcome, steps, rewards, staleness, tokens, time."""
        result = summary.read(self.run_dir)
        if result is None:
            raise ConfigError("run directory", str(self.run_dir), "it has no summary.json: the run has not ended")
        return result

    @property
    def good(self) -> bool:
        """True if the run finished or was drained, and no group was trained beyond the bound."""
        return self.summary.good

    @property
    def config(self) -> Config:
        """Configuration of the run."""
        return read_run(self.run_dir)

    @property
    def trace(self) -> "Trace":
        """Trace of the run."""
        return Trace.open(self.run_dir)

    def metrics(self) -> list[dict[str, Any]]:
        """Return the lines of ``metrics.jsonl``, one per step and evaluation, as values by metric name."""
        return metric_lines(self.run_dir / "metrics.jsonl")

    def report(self, path: Path | str | None = None) -> Path:
        """Write the HTML report, by default ``report.html`` in the run directory, and return its path."""
        from staleflow.report.page import report

        target = self.run_dir / "report.html" if path is None else Path(path)
        target.write_text(report(self.run_dir), encoding="utf-8")
        return target


def connect(where: Path | str, *, timeout_s: float = 5.0) -> "Run":
    """Connect to a running run by its directory or its scheduler's address (``tcp://...``, ``ipc://...``).

    Raise ``ConfigError`` if the run does not exist or, given its directory, has ended. Raise ``Unavailable`` if its
    scheduler does not answer within ``timeout_s``.
    """
    text = str(where)
    if "://" in text:
        return Run(text, None, timeout_s)
    folder = Path(where)
    address = addresses(read_run(folder), folder).scheduler
    _check_under_way(folder, address)
    return Run(address, folder, timeout_s)


def _check_under_way(folder: Path, address: str) -> None:
    """Raise ``ConfigError`` if no scheduler can answer: none listens, and a summary or a local socket path exists."""
    result = summary.read(folder)
    if may_answer(address) or not (result or address.startswith("ipc://")):
        return
    ended = f"{result.outcome}, {result.steps:,} of {result.steps_wanted:,} steps" if result else "or was never started"
    read = "read its files with staleflow.Result(Path(...)) or staleflow.Trace.open"
    raise ConfigError("run", str(folder), f"no scheduler listens: the run has ended ({ended}); {read}")


class Run:
    """Client of a running run. Close it, or use ``with``."""

    def __init__(self, address: str, run_dir: Path | None, timeout_s: float) -> None:
        self.address = address
        """Address of its scheduler."""
        self._timeout_s = timeout_s
        self._folder = run_dir
        known = read_run(run_dir).security if run_dir else None
        self._admin = Admin(address, "python", transport=client_sockets(known, *OBSERVER_ROLES))
        try:
            self._admin.status(timeout_s)
            attached = self._admin.run(timeout_s=timeout_s)
        except BaseException:
            self._admin.close()
            raise
        self.config = from_json(attached.config)
        """Configuration of the run."""
        self.run_dir = run_dir or Path(attached.run_dir)
        """Run directory on the scheduler's machine."""
        self.model_dir = model_dir(self.config, self.run_dir)
        """Directory of the initial model and the tokenizer, on the scheduler's machine."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; the run continues. Calling it again has no effect."""
        self._admin.close()

    def status(self) -> dict[str, Any]:
        """Return the values of ``staleflow status --json``: phase, ledger, window, instances, workers, metrics …"""
        status = self._admin.status(self._timeout_s)
        return {"phase": phase_of(status), **as_dict(status)}

    def why(self) -> str:
        """Return one sentence on what the run waits for."""
        status = self._admin.status(self._timeout_s)
        return status.error or status.why or "nothing waits"

    @property
    def trace(self) -> "Trace":
        """Trace of the run so far; available on the scheduler's machine only."""
        return Trace.open(self.run_dir)

    def drain(self, why: str = "asked from Python") -> None:
        """End the run early: train the groups in flight and lease no new ones.

        Acknowledged trajectories are kept, and the run can be resumed. Return once the scheduler has stored the drain,
        before the run has ended.
        """
        self._admin.drain(why, timeout_s=self._timeout_s)

    def trainer(self, name: str = "trainer", *, rank: int = 0, world: int = 1) -> "TrainerClient":
        """Return a client for a training loop: ``join``, ``batches``, ``commit``. For an example see docs/python.md."""
        from staleflow.clients.trainer.client import TrainerClient
        from staleflow.configs.loading.load import config_sha

        sockets = client_sockets(self.config.security, Role.TRAINER)
        return TrainerClient(
            self.address, name=name, config_sha=config_sha(self.config), rank=rank, world=world, transport=sockets
        )

    def attach(
        self,
        role: Literal["rollout", "stage"],
        name: str = "",
        *,
        stage: str = "reward",
        overrides: Sequence[str] = (),
    ) -> "Worker":
        """Start another engine, or another worker of a stage, as a process on this machine.

        ``overrides``: settings of this engine, ``["rollout.engine=vllm"]``; those that all processes share are refused.
        Returns once the run has taken it in. ``ConfigError`` with its last line if it ends before.
        """
        name = name or generated_name(role, stage)
        place = ("--connect", self.address)
        if self._folder is not None:  # its configuration names the keys
            place = ("--run-dir", str(self._folder))
        command = [sys.executable, "-m", "staleflow.cli", "attach", role, *place]
        command += ["--name", name, *(("--stage", stage) if role == "stage" else ()), *overrides]
        worker = Worker(
            subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, process_group=0, text=True)
        )
        try:
            while not self._has(name, worker.pid):
                if not worker.alive:
                    raise ConfigError(f"{role} worker", name, worker.last_line() or "it ended before it joined the run")
                time.sleep(POLL_INTERVAL_S)
        except BaseException:
            worker.leave()
            raise
        return worker

    def _has(self, name: str, pid: int) -> bool:
        """Return whether that process has attached to the run."""
        workers = self._admin.status(self._timeout_s).workers
        return any(worker.name == name and worker.pid == pid and worker.alive for worker in workers)


class Worker:
    """A process that ``Run.attach`` started. It exits when the run ends, or at the end of its ``with`` block."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        """``process`` must have a pipe as standard error, whose lines are forwarded."""
        self._process = process
        self._last = ""
        self._reader = threading.Thread(target=self._forward_stderr, name="worker's output", daemon=True)
        self._reader.start()
        self.pid = process.pid

    def _forward_stderr(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as lines:
            for line in lines:
                self._last = line.strip() or self._last
                sys.stderr.write(line)

    def last_line(self) -> str:
        """Return the last line that the process printed, once it has ended."""
        self._reader.join(LAST_LINE_S)
        return self._last

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()

    @property
    def alive(self) -> bool:
        """True while the process runs."""
        return self._process.poll() is None

    def leave(self, timeout_s: float = 15.0) -> int:
        """Stop the worker and return its exit code; it delivers finished groups and releases the others."""
        self._process.terminate()
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


class Trace:
    """The trace of a run, one event per line; for a running run, everything up to now."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def open(cls, path: Path | str) -> Self:
        """Open a ``trace.jsonl`` or a run directory that contains one. Raise ``ConfigError`` if there is none."""
        file = Path(path)
        file = file / TRACE if file.is_dir() else file
        if not file.is_file():
            raise ConfigError("trace", str(file), "no such file")
        return cls(file)

    def __repr__(self) -> str:
        try:
            with self.path.open("rb") as file:
                run = printable(typed(file.readline()).run)
                lines = 1 + sum(1 for _ in file)
        except (OSError, msgspec.DecodeError):
            return f"Trace({str(self.path)!r}, no lines that can be read)"
        return f"Trace({str(self.path)!r}, {lines:,} lines, run {run})"

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield each event as a mapping; ``ev`` is its kind, and ``staleflow.trace.events`` defines the fields."""
        return read_events(self.path)

    def check(self) -> AuditReport:
        """Audit hash chain, bound, exactly-once and fencing. The report has ``ok``, ``violations``, ``checks``."""
        return audit(self.path)

    def story(self, group: int) -> list[dict[str, Any]]:
        """Return every event about a group, from its lease to its end, and about the batches that contained it."""
        return events_about(self.path, group)

    def to_frame(self, *kinds: str) -> Any:
        """Return the events as a ``pandas.DataFrame``, filtered by ``kinds`` if given: ``to_frame("push", "release")``.

        ``seconds`` since the first event, ``time`` of day (UTC), ``name`` of a worker without its process's number,
        then the events' own fields; None where an event has none. ``ConfigError`` without pandas, the extra ``frames``.
        """
        from staleflow.report import tables

        return tables.frame(tables.columns(read_lines(self.path), kinds))

    def to_arrow(self, *kinds: str) -> Any:
        """Return the events as a ``pyarrow.Table`` (extra ``parquet``); lists and structs keep their types."""
        from staleflow.report import tables

        return tables.table(tables.columns(read_lines(self.path), kinds))
