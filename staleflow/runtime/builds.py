"""C++ that libraries build on first use, and the locks that an interrupted build leaves.

torch's extension builder waits for a lock file for ever. Nothing in the file says who holds it, so a lock counts as
stale when it is not new and no process works in its folder.
"""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

NEW_S = 30.0
"""A build needs no longer from its lock to its first compiler."""


def extensions() -> Path:
    """Where torch keeps what it built."""
    chosen = os.environ.get("TORCH_EXTENSIONS_DIR", "")
    cache = Path(os.environ.get("XDG_CACHE_HOME", "") or Path.home() / ".cache")
    return Path(chosen) if chosen else cache / "torch_extensions"


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
