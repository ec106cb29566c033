"""Choose, create, check and lock run directories.

A run directory never changes its configuration, except for the keys of ``configs/resumable.py``. One supervisor at a
time holds its lock.
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

from staleflow.configs import resumable
from staleflow.configs.durable_files import make_folder
from staleflow.configs.errors import ConfigError, shown
from staleflow.configs.loading.load import RESOLVED, difference, read_run, write_resolved
from staleflow.configs.schema import Config
from staleflow.protocols.wire.messages import SchedulerStatus
from staleflow.supervisor import summary

RUNS = Path("runs")
_LOCK = ".lock"
_POLL_INTERVAL_S = 0.1
_LOCK_TIMEOUT_S = 2.0
"""Time limit for locking. ``holder`` of another process may hold the lock briefly, longer on a loaded machine."""


def choose(config: Config, given: Path | None, *, resume: bool) -> Path:
    """Return the run directory for a new or resumed run after all checks. Writes nothing."""
    run_dir = given or (_newest(config.name) if resume else fresh(config.name))
    check_owner(run_dir)
    if (process := holder(run_dir)) is not None:
        raise _running(run_dir, process)
    if resume:
        run = read_run(run_dir)
        check_same(resumable.with_keys_of(config, run), run_dir)
        resumable.check(config, run)
        _check_steps(config, run_dir)
    elif (run_dir / RESOLVED).is_file():
        allowed = "it contains a run already: add --resume to continue it, or choose a new --run-dir"
        raise ConfigError("--run-dir", str(run_dir), allowed)
    else:
        _must_be_empty(run_dir)
    return run_dir


def check_owner(path: Path, what: str = "run directory") -> None:
    """Raise ``ConfigError`` for a directory or socket that another user owns or may write to.

    The configuration that it supplies names code to run. Root may not use those of another user either. Every user may
    use those of root, who can change all of them anyway.
    """
    try:
        owner = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return
    if owner.st_uid not in (os.geteuid(), 0):
        allowed = f"it belongs to {_user(owner.st_uid)}; it must be your own: choose another, or chown it"
        raise ConfigError(what, str(path), allowed)
    if owner.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        mode = f"{stat.S_IMODE(owner.st_mode):04o}"
        allowed = f"others may write to it (mode {mode}); only you may: chmod go-w {path}"
        raise ConfigError(what, str(path), allowed)


def _user(uid: int) -> str:
    try:
        return f"user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"user {uid}"


def check_same(config: Config, run_dir: Path) -> None:
    """Raise ``ConfigError`` unless the run directory has exactly this configuration."""
    if changed := difference(config, read_run(run_dir)):
        key, ours, theirs = changed
        allowed = f"{run_dir} was created with {shown(theirs)}: use its configuration or choose a new --run-dir"
        raise ConfigError(key, ours, allowed)


def _check_steps(config: Config, run_dir: Path) -> None:
    """Raise ``ConfigError`` for ``trainer.steps`` below the trained steps; the last start's value is always allowed."""
    steps = config.trainer.steps
    if steps < read_run(run_dir).trainer.steps and steps < (trained := summary.trained(run_dir)):
        allowed = f"{trained} steps are trained already in {run_dir}: use at least as many"
        raise ConfigError("trainer.steps", steps, allowed)


def adopt(config: Config, run_dir: Path) -> None:
    """Store the configuration of a run that is resumed with new values of ``resumable`` keys."""
    if read_run(run_dir) != config:
        write_resolved(config, run_dir)


def create(config: Config, run_dir: Path) -> None:
    """Create a run directory. Of several processes at once, one writes the configuration and the others must agree."""
    check_owner(run_dir)
    _must_be_empty(run_dir)
    make_folder(run_dir, 0o700)
    with (run_dir / f"{_LOCK}.config").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (run_dir / RESOLVED).is_file():
            check_same(config, run_dir)
        else:
            write_resolved(config, run_dir)


def holder(run_dir: Path) -> str | None:
    """Return the process that holds the directory, from before its servers answer until the summary is written."""
    try:
        with (run_dir / _LOCK).open() as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return _process(lock)
    except OSError:
        pass
    return None


def lost_supervisor(run_dir: Path) -> bool:
    """Return True for a run directory that a supervisor has held, and none holds any more."""
    return (run_dir / _LOCK).is_file() and holder(run_dir) is None


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
    """A run that ended without a summary, as after ``kill -9`` or a power failure."""

    steps: int
    steps_wanted: int
    resume: str
    """Command that continues the run; empty if its servers were started by hand."""

    def __str__(self) -> str:
        how = f"resume with: {self.resume}" if self.resume else "restart its servers and workers to continue"
        return f"the run died at step {self.steps:,} of {self.steps_wanted:,}; {how}"


def died(run_dir: Path) -> Died | None:
    """Return how a run died, or None if it did not. Call this only when no server answers.

    A run has died if it has a trace, but no summary and no process that holds its directory.
    """
    trace = run_dir / summary.TRACE
    if holder(run_dir) is not None or summary.read(run_dir) is not None or not trace.is_file():
        return None
    facts = summary.of_trace(trace, SchedulerStatus())
    try:
        resume = (run_dir / _LOCK).read_text().partition("\n")[2].strip()
        resume = resume or f"{summary.RUN} --run-dir {run_dir} --resume"
    except OSError:  # no supervisor: servers that were stopped by hand have closed the trace
        if facts.closed:
            return None
        resume = ""
    return Died(steps=facts.steps, steps_wanted=read_run(run_dir).trainer.steps, resume=resume)


def _running(run_dir: Path, process: str) -> ConfigError:
    allowed = f"it is running (process {process}); watch it with staleflow top {run_dir}"
    return ConfigError("--run-dir", str(run_dir), allowed)


@contextmanager
def claim(config: Config, run_dir: Path, *, resume: bool, command: str = "") -> Generator[None]:
    """Create the directory and hold its lock until the block ends. ``command`` resumes the run if this process dies."""
    check_owner(run_dir)
    make_folder(run_dir, 0o700)
    with (run_dir / _LOCK).open("a+") as lock:
        deadline = time.monotonic() + _LOCK_TIMEOUT_S
        while not _locked(lock):
            if time.monotonic() > deadline:
                lock.seek(0)
                raise _running(run_dir, _process(lock))
            time.sleep(_POLL_INTERVAL_S)
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
    """Return the run directory under ``runs/`` that was created or resumed last, whatever its name."""
    candidates = [path.parent for path in RUNS.glob(f"*/{RESOLVED}") if not path.parent.name.startswith("attached-")]
    return max(candidates, key=_used, default=None)


def _used(run_dir: Path) -> float:
    """Return the time at which a supervisor last claimed the directory."""
    lock = run_dir / _LOCK
    return (lock if lock.exists() else run_dir / RESOLVED).stat().st_mtime


def fresh(name: str) -> Path:
    """Return the path of a run directory that does not exist yet."""
    stem = f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    path, number = RUNS / stem, 1
    while path.exists():
        number += 1
        path = RUNS / f"{stem}-{number}"
    return path


def _newest(name: str) -> Path:
    """Return the newest run directory of this name."""
    candidates = [path.parent for path in RUNS.glob(f"{name}-*/{RESOLVED}") if _is_named(path.parent, name)]
    if not candidates:
        raise ConfigError("--resume", name, f"no run of this name exists under {RUNS}/; give --run-dir")
    return max(candidates, key=lambda path: (path / RESOLVED).stat().st_mtime)


def _is_named(run_dir: Path, name: str) -> bool:
    """Return whether the directory's run has this name; False if its configuration cannot be read."""
    try:
        return read_run(run_dir).name == name
    except ConfigError:
        return False


def _must_be_empty(run_dir: Path) -> None:
    try:
        existing = [entry for entry in run_dir.iterdir() if not entry.name.startswith(_LOCK)]
    except FileNotFoundError:
        return
    except NotADirectoryError:
        raise ConfigError("--run-dir", str(run_dir), "it must be a directory") from None
    if existing:
        allowed = f"it must be new or empty; it contains {existing[0].name}, which is kept"
        raise ConfigError("--run-dir", str(run_dir), allowed)
