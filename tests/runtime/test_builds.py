"""Locks that an interrupted build leaves."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from staleflow.runtime.builds import NEW_S, clear_stale_locks, extensions, stale_locks


def lock(root: Path, operation: str, age_s: float) -> Path:
    path = root / "py311_cpu" / operation / "lock"
    path.parent.mkdir(parents=True)
    path.touch()
    when = time.time() - age_s
    os.utime(path, (when, when))
    return path


def test_a_lock_that_is_old_and_has_nobody_at_work_is_removed(tmp_path: Path) -> None:
    old, new = lock(tmp_path, "old", NEW_S + 5), lock(tmp_path, "new", 0)
    assert stale_locks(tmp_path) == [old]
    assert clear_stale_locks(tmp_path) == [old]
    assert (old.exists(), new.exists()) == (False, True)
    assert clear_stale_locks(tmp_path / "nowhere") == []


def test_a_lock_of_a_build_that_still_runs_is_left_alone(tmp_path: Path) -> None:
    held = lock(tmp_path, "busy", 10 * NEW_S)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, cwd=held.parent) as builder:
        assert stale_locks(tmp_path) == []
        builder.communicate(b"\n")
    assert stale_locks(tmp_path) == [held]


def test_each_environment_builds_in_a_folder_of_its_own_unless_told_where(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    assert extensions() == tmp_path
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    here = extensions()
    assert here.is_relative_to("/cache/staleflow/torch_extensions")
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(sys, "prefix", "/another/environment")
        assert extensions().parent == here.parent
        assert extensions() != here
    monkeypatch.setattr("staleflow.runtime.builds.version", {"torch": "2.0", "deepspeed": "0.1"}.__getitem__)
    assert extensions() != here
