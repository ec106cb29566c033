"""Run directories: which one a run gets, which one is meant, and that nobody writes over another's.

A directory keeps the configuration it was made with for ever; one supervisor holds it at a time.
"""

import fcntl
import os
import pwd
import stat
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TextIO

from staleflow.configs.durable_files import make_folder
from staleflow.configs.errors import ConfigError, shown
from staleflow.configs.loading.load import RESOLVED, difference, read_run, with_steps, write_resolved
from staleflow.configs.schema import Config
from staleflow.supervisor import summary

RUNS = Path("runs")
_LOCK = ".lock"
_POLL_INTERVAL_S = 0.1
"""Longer than anybody takes who only looks whether it is held."""


def choose(config: Config, given: Path | None, *, resume: bool) -> Path:
    """The run directory, checked; nothing is written yet."""
    run_dir = given or (_newest(config.name) if resume else fresh(config.name))
    check_owner(run_dir)
    if (process := holder(run_dir)) is not None:
        raise _running(run_dir, process)
    if resume:
        same(with_steps(config, read_run(run_dir).trainer.steps), run_dir)
        _check_steps(config, run_dir)
    elif (run_dir / RESOLVED).is_file():
        allowed = "there is a run in it already: add --resume to go on with it, or choose a new --run-dir"
        raise ConfigError("--run-dir", str(run_dir), allowed)
    else:
        _must_be_empty(run_dir)
    return run_dir


def check_owner(run_dir: Path) -> None:
    """``ConfigError`` for a directory that another user owns or may write to: its configuration names code to run.

    Root may use no other user's directory either. Everybody may use one of root, who can change all of them anyway.
    """
    try:
        found = run_dir.stat()
    except (FileNotFoundError, NotADirectoryError):
        return
    if found.st_uid not in (os.geteuid(), 0):
        allowed = f"it belongs to {_user(found.st_uid)}; it must be your own: choose another directory, or chown it"
        raise ConfigError("run directory", str(run_dir), allowed)
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        mode = f"{stat.S_IMODE(found.st_mode):04o}"
        allowed = f"others may write to it (mode {mode}); it must be yours alone: chmod go-w {run_dir}"
        raise ConfigError("run directory", str(run_dir), allowed)


def _user(uid: int) -> str:
    try:
        return f"user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"user {uid}"


def same(config: Config, run_dir: Path) -> None:
    """``ConfigError`` unless the run directory was made with this very configuration."""
    if found := difference(config, read_run(run_dir)):
        key, ours, theirs = found
        allowed = f"{run_dir} was made with {shown(theirs)}: use its own configuration or choose a new --run-dir"
        raise ConfigError(key, ours, allowed)


def _check_steps(config: Config, run_dir: Path) -> None:
    """``ConfigError`` for ``trainer.steps`` below the steps that are trained; as many as before are fine always."""
    steps = config.trainer.steps
    if steps < read_run(run_dir).trainer.steps and steps < (trained := summary.trained(run_dir)):
        allowed = f"{trained} steps are trained already in {run_dir}: use at least as many"
        raise ConfigError("trainer.steps", steps, allowed)


def adopt(config: Config, run_dir: Path) -> None:
    """Write the configuration of a run that is resumed with other ``trainer.steps``."""
    if read_run(run_dir) != config:
        write_resolved(config, run_dir)


def first(config: Config, run_dir: Path) -> None:
    """A new run directory; of several processes that come at once the first writes it and the others must agree."""
    check_owner(run_dir)
    _must_be_empty(run_dir)
    make_folder(run_dir, 0o700)
    with (run_dir / f"{_LOCK}.config").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (run_dir / RESOLVED).is_file():
            same(config, run_dir)
        else:
            write_resolved(config, run_dir)


def holder(run_dir: Path) -> str | None:
    """The number of the process that runs there, from before its servers answer until its summary is written."""
    try:
        with (run_dir / _LOCK).open() as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return _process(lock)
    except OSError:
        pass
    return None


def without_scheduler(run_dir: Path, process: str) -> str:
    """Explain why a run that ``process`` holds has no scheduler that listens."""
    try:
        began_s, traced_s = ((run_dir / name).stat().st_mtime for name in (_LOCK, "trace.jsonl"))
    except OSError:
        return f"the run in {run_dir} is being started (process {process})"
    if traced_s < began_s:
        return f"the run in {run_dir} is being resumed (process {process})"
    return f"the scheduler of the run in {run_dir} is down: process {process} restarts it, or ends the run"


def _process(lock: TextIO) -> str:
    return lock.readline().strip() or "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Died:
    """A run whose processes are gone without a word, as after ``kill -9`` or a power failure."""

    steps: int
    steps_wanted: int
    resume: str
    """The command that continues it; empty where its servers were started by hand."""

    def __str__(self) -> str:
        how = f"resume with: {self.resume}" if self.resume else "start its servers and workers again to continue"
        return f"the run died at step {self.steps:,} of {self.steps_wanted:,}; {how}"


def died(run_dir: Path) -> Died | None:
    """How a run died that has a trace, no summary, and no process that holds it. Call it when no server answers."""
    trace = run_dir / summary.TRACE
    if holder(run_dir) is not None or summary.read(run_dir) is not None or not trace.is_file():
        return None
    found = summary.of_trace(trace)
    try:
        resume = (run_dir / _LOCK).read_text().partition("\n")[2].strip()
        resume = resume or f"{summary.RUN} --run-dir {run_dir} --resume"
    except OSError:  # no supervisor had it: servers that were asked to end have closed the trace
        if found.closed:
            return None
        resume = ""
    return Died(steps=max(found.steps, 0), steps_wanted=read_run(run_dir).trainer.steps, resume=resume)


def _running(run_dir: Path, process: str) -> ConfigError:
    allowed = f"it is running (process {process}); watch it with staleflow top {run_dir}"
    return ConfigError("--run-dir", str(run_dir), allowed)


@contextmanager
def claim(config: Config, run_dir: Path, *, resume: bool, command: str = "") -> Generator[None]:
    """Make the directory and hold it: one supervisor at a time. ``command`` resumes the run if this process dies."""
    check_owner(run_dir)
    make_folder(run_dir, 0o700)
    with (run_dir / _LOCK).open("a+") as lock:
        if not _locked(lock):
            time.sleep(_POLL_INTERVAL_S)
            if not _locked(lock):
                lock.seek(0)
                raise _running(run_dir, _process(lock))
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n{command}\n")
        lock.flush()
        if resume:
            adopt(config, run_dir)
            summary.forget(run_dir)
        else:
            write_resolved(config, run_dir)
        yield


def _locked(lock: TextIO) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def newest() -> Path | None:
    """The run directory under ``runs/`` that was made or resumed last, whatever its name."""
    found = [path.parent for path in RUNS.glob(f"*/{RESOLVED}") if not path.parent.name.startswith("attached-")]
    return max(found, key=_used, default=None)


def _used(run_dir: Path) -> float:
    """When a supervisor came to it last."""
    lock = run_dir / _LOCK
    return (lock if lock.exists() else run_dir / RESOLVED).stat().st_mtime


def fresh(name: str) -> Path:
    """A run directory that is not there yet."""
    stem = f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    path, number = RUNS / stem, 1
    while path.exists():
        number += 1
        path = RUNS / f"{stem}-{number}"
    return path


def _newest(name: str) -> Path:
    """The run directory of this name that was made last."""
    found = [path.parent for path in RUNS.glob(f"{name}-*/{RESOLVED}") if _is_named(path.parent, name)]
    if not found:
        raise ConfigError("--resume", name, f"there is no run of this name under {RUNS}/; give --run-dir")
    return max(found, key=lambda path: (path / RESOLVED).stat().st_mtime)


def _is_named(run_dir: Path, name: str) -> bool:
    """One that cannot be read, torn or of another version, is none to go on with."""
    try:
        return read_run(run_dir).name == name
    except ConfigError:
        return False


def _must_be_empty(run_dir: Path) -> None:
    try:
        taken = [entry for entry in run_dir.iterdir() if not entry.name.startswith(_LOCK)]
    except FileNotFoundError:
        return
    except NotADirectoryError:
        raise ConfigError("--run-dir", str(run_dir), "it must be a directory") from None
    if taken:
        allowed = f"it must be new or empty; it has {taken[0].name}, which is left alone"
        raise ConfigError("--run-dir", str(run_dir), allowed)
