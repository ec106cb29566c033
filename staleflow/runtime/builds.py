"""C++ that libraries build on first use, and the locks that an interrupted build leaves.

torch's extension builder waits for a lock file for ever. Nothing in the file says who holds it, so a lock counts as
stale when it is not new and no process works in its folder.

By itself torch has one folder for all environments of a user, and each builds anew what another one built before: the
commands name its own headers. Half a minute each time, minutes on a busy machine. So every environment, and every torch
in it, has a folder here.
"""

import hashlib
import os
import sys
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

NEW_S = 30.0
"""A build needs no longer from its lock to its first compiler."""


FOLDER = "TORCH_EXTENSIONS_DIR"
"""The environment variable that torch reads."""


def extensions() -> Path:
    """Where this environment's builds belong; ``FOLDER`` wins."""
    chosen = os.environ.get(FOLDER, "")
    cache = Path(os.environ.get("XDG_CACHE_HOME", "") or Path.home() / ".cache")
    names = [sys.prefix, *(_version(package) for package in ("torch", "deepspeed"))]
    own = hashlib.sha256(" ".join(names).encode()).hexdigest()[:12]
    return Path(chosen) if chosen else cache / "staleflow" / "torch_extensions" / own


def stale_locks(root: Path, now_s: float | None = None) -> list[Path]:
    """Locks under ``root`` that nobody will ever release."""
    now = time.time() if now_s is None else now_s
    found = sorted(path for pattern in ("*/lock", "*/*/lock") for path in root.glob(pattern))
    old = [path for path in found if _age_s(path, now) > NEW_S]
    busy = set(_working_folders()) if old else set[Path]()
    return [path for path in old if not any(folder == path.parent or path.parent in folder.parents for folder in busy)]


def clear_stale_locks(root: Path) -> list[Path]:
    """Remove them; returns those that were there."""
    stale = stale_locks(root)
    for path in stale:
        path.unlink(missing_ok=True)
    return stale


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _age_s(path: Path, now: float) -> float:
    try:
        return now - path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _working_folders() -> Iterator[Path]:
    for process in psutil.process_iter():
        try:
            yield Path(process.cwd())
        except (psutil.Error, OSError):
            continue
