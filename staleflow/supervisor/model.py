"""The model directory of a run: linked when it exists, made once when ``model.build`` makes it.

Built beside its place and renamed, under a lock: whoever needs it first builds it, everybody else waits, and half a
model is never seen. ``python -m staleflow.supervisor.model RUN_DIR`` does it in a process of its own.
"""

import fcntl
import logging
import shutil
import sys
from contextlib import suppress
from pathlib import Path

from staleflow.configs.durable_files import make_folder, replace_durably, sync_path
from staleflow.configs.errors import ConfigError
from staleflow.configs.loading.imports import load_object
from staleflow.configs.loading.load import read_run
from staleflow.configs.loading.presence import check_model_dir
from staleflow.configs.rules.checks import needs_model
from staleflow.configs.schema import Config
from staleflow.supervisor import lifeline

_PARTIAL = ".model.partial"


def missing(config: Config, run_dir: Path) -> bool:
    """True when a model must be built before anything can load it."""
    return needs_model(config) and bool(config.model.build) and not (run_dir / "model").exists()


def so_far(run_dir: Path, words: str = "") -> str:
    """``words``, and the file of a model being built that was written last, with its size, if it has a megabyte."""
    files = list[tuple[float, int, str]]()
    for path in (run_dir / _PARTIAL).rglob("*"):
        with suppress(OSError):  # it is written this moment
            found = path.stat()
            if path.is_file() and found.st_size >= 10**6:
                name = "a download" if path.suffix == ".incomplete" else path.name
                files.append((found.st_mtime, found.st_size, name))
    if not files:
        return words
    _, nbytes, name = max(files)
    return ", ".join(filter(None, (words, f"{name}: {nbytes / 1e6:,.0f} MB so far")))


def ensure(config: Config, run_dir: Path) -> None:
    """Afterwards ``run_dir/model`` is a model directory, if this run needs one."""
    if not needs_model(config):
        return
    target = run_dir / "model"
    make_folder(run_dir)
    with (run_dir / ".lock.model").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if target.exists():
            return
        if config.model.path:
            check_model_dir(Path(config.model.path))
            target.symlink_to(config.model.path, target_is_directory=True)
            sync_path(run_dir)
        else:
            _build(config, target)


def _build(config: Config, target: Path) -> None:
    build = load_object(config.model.build, "model.build")
    partial = target.with_name(_PARTIAL)
    shutil.rmtree(partial, ignore_errors=True)
    build(partial, seed=config.seed, **config.model.options)
    check_model_dir(partial, "model.build")
    replace_durably(partial, target)


def main() -> int:
    lifeline.hold()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    run_dir = Path(sys.argv[1])
    try:
        ensure(read_run(run_dir), run_dir)
    except ConfigError as error:
        print(f"staleflow: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
