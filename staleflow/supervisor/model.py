"""The model directory of a run: a link to an existing model, or built once by ``model.build``.

The first process that needs the model builds it under a lock, and all others wait. The directory is built under a
temporary name and renamed, so that an incomplete model is never visible. ``python -m staleflow.supervisor.model
RUN_DIR`` builds it in a separate process.
"""

import fcntl
import logging
import shutil
import sys
from contextlib import suppress
from pathlib import Path

from staleflow.configs.durable_files import make_folder, replace_durably, sync_path
from staleflow.configs.errors import ConfigError
from staleflow.configs.imports import load_object
from staleflow.configs.loading.hub import locate_model
from staleflow.configs.loading.load import read_run
from staleflow.configs.loading.presence import check_model_dir
from staleflow.configs.rules.checks import needs_model
from staleflow.configs.schema import Config
from staleflow.supervisor import lifeline

_PARTIAL = ".model.partial"


def missing(config: Config, run_dir: Path) -> bool:
    """Return True if a model must be built before a worker can load it."""
    return needs_model(config) and bool(config.model.build) and not (run_dir / "model").exists()


def download_progress(run_dir: Path, message: str = "") -> str:
    """Return ``message`` and the newest file of the model being built, with its size, if it has at least 1 MB."""
    files = list[tuple[float, int, str]]()
    for path in (run_dir / _PARTIAL).rglob("*"):
        with suppress(OSError):  # renamed or deleted since it was listed
            stat = path.stat()
            if path.is_file() and stat.st_size >= 10**6:
                name = "a download" if path.suffix == ".incomplete" else path.name
                files.append((stat.st_mtime, stat.st_size, name))
    if not files:
        return message
    _, nbytes, name = max(files)
    return ", ".join(filter(None, (message, f"{name}: {nbytes / 1e6:,.0f} MB so far")))


def ensure(config: Config, run_dir: Path) -> None:
    """Create ``run_dir/model`` if this run needs a model; return once it is complete."""
    if not needs_model(config):
        return
    target = run_dir / "model"
    make_folder(run_dir)
    with (run_dir / ".lock.model").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if target.exists():
            return
        if config.model.path:
            directory = locate_model(config.model.path)
            check_model_dir(directory)
            target.symlink_to(directory, target_is_directory=True)
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
    lifeline.watch_supervisor()
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
