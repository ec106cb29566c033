"""Run directories: which one a run gets, and that nobody writes over another's.

A directory keeps the configuration it was made with for ever; one supervisor holds it at a time.
"""

import fcntl
import os
from collections.abc import Generator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from staleflow.configs.errors import ConfigError, shown
from staleflow.configs.load import RESOLVED, difference, read_run, write_resolved
from staleflow.configs.schema import Config

RUNS = Path("runs")
_LOCK = ".lock"


def choose(config: Config, given: Path | None, *, resume: bool) -> Path:
    """The run directory, checked; nothing is written yet."""
    run_dir = given or (_newest(config.name) if resume else fresh(config.name))
    if resume:
        same(config, run_dir)
    elif (run_dir / RESOLVED).is_file():
        allowed = "there is a run in it already: add --resume to go on with it, or choose a new --run-dir"
        raise ConfigError("--run-dir", str(run_dir), allowed)
    else:
        _must_be_empty(run_dir)
    return run_dir


def same(config: Config, run_dir: Path) -> None:
    """``ConfigError`` unless the run directory was made with this very configuration."""
    if found := difference(config, read_run(run_dir)):
        key, ours, theirs = found
        allowed = f"{run_dir} was made with {shown(theirs)}: use its own configuration or choose a new --run-dir"
        raise ConfigError(key, ours, allowed)


def first(config: Config, run_dir: Path) -> None:
    """A new run directory; of several processes that come at once the first writes it and the others must agree."""
    _must_be_empty(run_dir)
    run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (run_dir / f"{_LOCK}.config").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (run_dir / RESOLVED).is_file():
            same(config, run_dir)
        else:
            write_resolved(config, run_dir)


@contextmanager
def claim(config: Config, run_dir: Path, *, resume: bool) -> Generator[None]:
    """Makes the directory and holds it: one supervisor at a time."""
    run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (run_dir / _LOCK).open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            allowed = f"process {lock.read().strip() or 'unknown'} runs there; end it or choose another --run-dir"
            raise ConfigError("--run-dir", str(run_dir), allowed) from None
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        if not resume:
            write_resolved(config, run_dir)
        yield


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
    found = [path.parent for path in RUNS.glob(f"{name}-*/{RESOLVED}") if read_run(path.parent).name == name]
    if not found:
        raise ConfigError("--resume", name, f"there is no run of this name under {RUNS}/; give --run-dir")
    return max(found, key=lambda path: (path / RESOLVED).stat().st_mtime)


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
