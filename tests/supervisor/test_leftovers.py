"""Versions that killed runs left in shared memory are removed by the next start, those of others are not."""

import fcntl
import os
import time
from pathlib import Path

import pytest

from staleflow.process import memory_folder
from staleflow.supervisor.leftovers import sweep


def until_gone(path: Path) -> None:
    """Wait for the end of the removal: another run's sweep may have begun it."""
    deadline = time.monotonic() + 120
    while path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("of", ["parameters", "relays/relay-0"])
@pytest.mark.parametrize(
    ("state", "stays"), [("died", False), ("deleted", False), ("running", True), ("started by hand", True)]
)
def test_only_the_remains_of_the_dead_are_removed(tmp_path: Path, of: str, state: str, stays: bool) -> None:
    folder = tmp_path / "run" / of
    folder.mkdir(parents=True)
    path = memory_folder.create(folder)
    (path / "0-0.bin").write_bytes(b"w")
    (tmp_path / ".lock").write_text("of another program\n")  # in the folder above the run directory
    lock = tmp_path / "run" / ".lock"
    if state == "died":
        lock.write_text("1\n")
    if state == "deleted":
        folder.rmdir()
    try:
        with (tmp_path / "held").open("w") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            held.write("1\n")
            held.flush()
            if state == "running":  # locked before it has this name: runs of other tests sweep at any time
                os.rename(held.name, lock)
            sweep()
            if stays:
                assert path.exists()
            else:
                until_gone(path)
    finally:
        memory_folder.remove(folder)
    until_gone(path)


def test_a_folder_in_use_stays_although_its_disk_folder_is_not_visible(tmp_path: Path) -> None:
    """The server runs in another container, with the same /dev/shm."""
    folder = tmp_path / "run" / "parameters"
    folder.mkdir(parents=True)
    lock = memory_folder.lock(path := memory_folder.create(folder))
    folder.rmdir()
    try:
        sweep()
        assert path.exists()
        assert not memory_folder.remove(folder)
    finally:
        os.close(lock)
    sweep()
    until_gone(path)
