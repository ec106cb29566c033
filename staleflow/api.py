"""Runs and traces from Python: a script, a notebook, a test.

Nothing here belongs to an event loop, so all of it works where one is running already.
"""

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import msgspec

from staleflow.clients.admin import Admin
from staleflow.configs.errors import ConfigError
from staleflow.configs.loading.load import addresses, from_json, load, read_run
from staleflow.configs.loading.presence import present
from staleflow.configs.schema import Config
from staleflow.metrics.reader import metric_lines
from staleflow.monitor.sources import phase_of
from staleflow.monitor.story import events_about
from staleflow.net.permissions import Role
from staleflow.net.security import LOOKING, client_sockets
from staleflow.process.sanitize import printable
from staleflow.report.writers import with_writers
from staleflow.supervisor import rundir, summary
from staleflow.supervisor.addresses import check_free, may_answer
from staleflow.supervisor.supervisor import Supervisor
from staleflow.supervisor.view import Snapshot, View
from staleflow.trace.audit.report import AuditReport, audit
from staleflow.trace.reader import decoded
from staleflow.trace.writer import read_events

if TYPE_CHECKING:
    from staleflow.clients.trainer.client import TrainerClient

TRACE = "trace.jsonl"
POLL_INTERVAL_S = 0.1
"""Between two looks at whether a worker has joined the run."""
LAST_LINE_S = 1.0
"""In which the last line of a process that has ended is read; a process that it started may hold the pipe."""


def run(
    config: Config | Path | str,
    *overrides: str,
    run_dir: Path | str | None = None,
    resume: bool = False,
    progress: bool = True,
) -> "Result":
    """Start every role of a configuration on this machine and train; returns when all of them have ended.

    ``config``: a file, or what ``load`` made of one. ``overrides``: ``"trainer.steps=4"``, as on the command line.
    ``run_dir``: default ``runs/NAME-TIMESTAMP``. ``resume``: go on there; a finished run is left as it is.
    ``progress``: a line every few seconds.
    An interrupt (Ctrl-C, a notebook's stop button) drains the run, and is the result's ``outcome``.

    ``ConfigError`` for whatever is wrong with the configuration, before anything is started.
    """
    if isinstance(config, Config):
        if overrides:
            raise ConfigError(
                "override", overrides[0], "a configuration that is loaded does not change: load(file, ...)"
            )
        chosen = config
    else:
        chosen = load(config, overrides)
    with _said_here():
        folder = rundir.choose(chosen, None if run_dir is None else Path(run_dir), resume=resume)
    if resume and (done := summary.finished(folder, chosen.trainer.steps)) is not None:
        if progress:
            sys.stdout.write(f"{summary.how_to_continue(done, chosen)}\n")
        return Result(folder)
    present(chosen)
    check_free(chosen, folder)
    view = with_writers(_view(chosen, folder, progress), chosen, folder)
    command = f"staleflow.run(..., run_dir={str(folder)!r}, resume=True)"
    with _said_here(), rundir.claim(chosen, folder, resume=resume, command=command):
        Supervisor(chosen, folder, view, command).run()
    return Result(folder)


@contextmanager
def _said_here() -> Generator[None]:
    """What the command line calls by its options has the names of arguments here."""
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

    return PlainView(sys.stdout, config.name, run_dir=folder) if progress else _Silence()


class _Silence:
    """A view that shows nothing."""

    def start(self) -> None: ...
    def show(self, snapshot: Snapshot) -> None: ...
    def notify(self, text: str) -> None: ...
    def stop(self) -> None: ...
    def summary(self, summary: summary.Summary) -> None: ...


@dataclass(frozen=True)
class Result:
    """A run that has ended, by its directory."""

    run_dir: Path

    @cached_property
    def summary(self) -> summary.Summary:
        """What ``summary.json`` says: outcome, steps, rewards, staleness, tokens, time."""
        found = summary.read(self.run_dir)
        if found is None:
            raise ConfigError("run directory", str(self.run_dir), "it has no summary.json: the run has not ended")
        return found

    @property
    def good(self) -> bool:
        """The run finished or was drained, and no group was trained beyond the bound."""
        return self.summary.good

    @property
    def config(self) -> Config:
        """That the run was made with."""
        return read_run(self.run_dir)

    @property
    def trace(self) -> "Trace":
        """Everything that happened."""
        return Trace.open(self.run_dir)

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of ``metrics.jsonl``, one a step and one an evaluation; numbers by name."""
        return metric_lines(self.run_dir / "metrics.jsonl")

    def report(self, path: Path | str | None = None) -> Path:
        """Write one HTML page about the run, by default ``report.html`` in its directory; where it is."""
        from staleflow.report.page import report

        target = self.run_dir / "report.html" if path is None else Path(path)
        target.write_text(report(self.run_dir), encoding="utf-8")
        return target


def connect(where: Path | str, *, timeout_s: float = 5.0) -> "Run":
    """A run that is under way, by its directory or its scheduler's address (``tcp://...``, ``ipc://...``).

    ``ConfigError`` if there never was one, or by its directory if it has ended; ``Unavailable`` if its scheduler does
    not answer within ``timeout_s``.
    """
    text = str(where)
    if "://" in text:
        return Run(text, None, timeout_s)
    folder = Path(where)
    address = addresses(read_run(folder), folder).scheduler
    _check_under_way(folder, address)
    return Run(address, folder, timeout_s)


def _check_under_way(folder: Path, address: str) -> None:
    """``ConfigError`` where nobody can answer: there is a summary or a socket of this machine, and nobody listens."""
    found = summary.read(folder)
    if may_answer(address) or not (found or address.startswith("ipc://")):
        return
    ended = f"{found.outcome}, {found.steps:,} of {found.steps_wanted:,} steps" if found else "or was never started"
    read = "staleflow.Result(Path(...)) and staleflow.Trace.open read what a run leaves"
    raise ConfigError("run", str(folder), f"nobody answers there: it has ended ({ended}); {read}")


class Run:
    """A run that is under way, looked at from outside. Close it, or use ``with``."""

    def __init__(self, address: str, run_dir: Path | None, timeout_s: float) -> None:
        self.address = address
        """Of its scheduler."""
        self._timeout_s = timeout_s
        self._folder = run_dir
        known = read_run(run_dir).security if run_dir else None
        self._admin = Admin(address, "python", transport=client_sockets(known, *LOOKING))
        try:
            self._admin.status(timeout_s=timeout_s)
            attached = self._admin.run(timeout_s=timeout_s)
        except BaseException:
            self._admin.close()
            raise
        self.config = from_json(attached.config)
        """That the run was made with."""
        self.run_dir = run_dir or Path(attached.run_dir)
        """On the scheduler's machine."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the connection; the run goes on. May be called again."""
        self._admin.close()

    def status(self) -> dict[str, Any]:
        """What ``staleflow status --json`` prints: phase, ledger, window, instances, workers, stages, metrics ..."""
        values = self._admin.status(timeout_s=self._timeout_s)
        return {"phase": phase_of(values), **values}

    def why(self) -> str:
        """What anything waits for, in one sentence."""
        status = self.status()
        return str(status.get("error") or status.get("why") or "nothing waits")

    @property
    def trace(self) -> "Trace":
        """Everything that happened so far; on the scheduler's machine only."""
        return Trace.open(self.run_dir)

    def drain(self, why: str = "asked from Python") -> None:
        """End the run early: train what is under way, lease nothing new. What is acknowledged is kept; the run can be
        resumed. Returns once the scheduler has stored it, before the run has ended."""
        self._admin.drain(why, timeout_s=self._timeout_s)

    def trainer(self, name: str = "trainer", *, rank: int = 0, world: int = 1) -> "TrainerClient":
        """A training loop's side of the service: ``join``, ``batches``, ``commit``. docs/python.md has a whole loop."""
        from staleflow.clients.trainer.client import TrainerClient
        from staleflow.configs.loading.load import config_sha

        sockets = client_sockets(self.config.security, Role.TRAINER)
        return TrainerClient(
            self.address, name=name, config_sha=config_sha(self.config), rank=rank, world=world, transport=sockets
        )

    def attach(self, role: Literal["rollout", "stage"], name: str = "", *, stage: str = "reward") -> "Worker":
        """Start one more engine, or one more worker of a stage, as a process on this machine.

        Returns once the run has taken it in. ``ConfigError`` with its last line if it ends before.
        """
        name = name or f"{role}-{os.urandom(2).hex()}"
        place = ("--connect", self.address)
        if self._folder is not None:  # its configuration names the keys
            place = ("--run-dir", str(self._folder))
        command = [sys.executable, "-m", "staleflow.cli", "attach", role, *place]
        command += ["--name", name, *(("--stage", stage) if role == "stage" else ())]
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
        """Whether the run has taken that process in."""
        workers = self._admin.status(timeout_s=self._timeout_s)["workers"]
        return any(worker["name"] == name and worker["pid"] == pid and worker["alive"] for worker in workers)


class Worker:
    """A process that ``Run.attach`` started. It leaves by itself when the run ends; at the latest with its ``with``."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        """``process``: with its standard error as a pipe, which is passed on."""
        self._process = process
        self._last = ""
        self._reader = threading.Thread(target=self._pass_on, name="worker's output", daemon=True)
        self._reader.start()
        self.pid = process.pid

    def _pass_on(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as lines:
            for line in lines:
                self._last = line.strip() or self._last
                sys.stderr.write(line)

    def last_line(self) -> str:
        """The last line that it printed, after its end."""
        self._reader.join(LAST_LINE_S)
        return self._last

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()

    @property
    def alive(self) -> bool:
        """Whether the process has not ended."""
        return self._process.poll() is None

    def leave(self, timeout_s: float = 15.0) -> int:
        """Ask it to go: what it has finished is delivered, the rest is dealt to others. Its exit code."""
        self._process.terminate()
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


class Trace:
    """What the ledger did, one event a line; of a run that goes on, everything up to now."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def open(cls, path: Path | str) -> Self:
        """A ``trace.jsonl``, or the run directory that has one. ``ConfigError`` when there is none."""
        file = Path(path)
        file = file / TRACE if file.is_dir() else file
        if not file.is_file():
            raise ConfigError("trace", str(file), "no such file")
        return cls(file)

    def __repr__(self) -> str:
        try:
            with self.path.open("rb") as file:
                run = printable(decoded(file.readline())["run"])
                lines = 1 + sum(1 for _ in file)
        except (OSError, msgspec.DecodeError):
            return f"Trace({str(self.path)!r}, no lines that can be read)"
        return f"Trace({str(self.path)!r}, {lines:,} lines, run {run})"

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Each event as it stands in the file; ``ev`` says which, ``staleflow.trace.events`` what it has."""
        return read_events(self.path)

    def check(self) -> AuditReport:
        """Recount all of it: hash chain, the bound, exactly-once, fencing. ``ok``, ``violations``, ``checks``."""
        return audit(self.path)

    def story(self, group: int) -> list[dict[str, Any]]:
        """Every event about a group, from its lease to its end, and of the batches that it was in."""
        return events_about(self.path, group)

    def to_frame(self, *kinds: str) -> Any:
        """The events as a ``pandas.DataFrame``, of ``kinds`` only if any are given: ``to_frame("push", "release")``.

        ``seconds`` since the first event, ``time`` of day (UTC), ``name`` of a worker without its process's number,
        then the events' own fields; None where an event has none. ``ConfigError`` without pandas, the extra ``frames``.
        """
        from staleflow.report import tables

        return tables.frame(tables.columns(self, kinds))

    def to_arrow(self, *kinds: str) -> Any:
        """The same as a ``pyarrow.Table`` (the extra ``parquet``); lists and structs keep their types."""
        from staleflow.report import tables

        return tables.table(tables.columns(self, kinds))
