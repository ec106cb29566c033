"""A file is reused only when it has no reader left: no process, no map, no array."""

import errno
import fcntl
import mmap
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from staleflow.store.shared_file import hold, take

_READER = """
import sys, time
from pathlib import Path
from staleflow.store.shared_file import hold
hold(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


def mapped(path: Path) -> np.ndarray:
    descriptor = hold(path)
    try:
        return np.frombuffer(mmap.mmap(descriptor, 0, prot=mmap.PROT_READ), np.uint8)
    finally:
        os.close(descriptor)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "a"
    path.write_bytes(b"abc")
    return path


def test_a_file_is_taken_when_the_last_array_on_it_is_gone(path: Path) -> None:
    array = mapped(path)[1:]
    assert not take(path, path.with_name("b"))
    assert path.exists()
    del array
    assert take(path, path.with_name("b"))
    assert not path.exists()


def test_a_file_that_was_taken_is_not_there_to_hold(path: Path) -> None:
    assert take(path, path.with_name("b"))
    with pytest.raises(FileNotFoundError):
        hold(path)


def test_a_file_that_is_taken_while_it_is_opened_is_not_held(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = os.open

    def slow_open(name: Path, flags: int) -> int:
        descriptor = opened(name, flags)
        with monkeypatch.context() as quick:
            quick.setattr(os, "open", opened)
            assert take(path, path.with_name("b"))
            path.write_bytes(b"another")
        return descriptor

    monkeypatch.setattr(os, "open", slow_open)
    with pytest.raises(FileNotFoundError):
        hold(path)


@pytest.mark.parametrize("why", [errno.EBADF, errno.ENOSYS])  # errors of NFS, and of Lustre without ``-o flock``
def test_a_file_that_cannot_be_locked_is_left_where_it_is(
    path: Path, monkeypatch: pytest.MonkeyPatch, why: int
) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(why, os.strerror(why))

    monkeypatch.setattr(fcntl, "flock", flock)
    assert not take(path, path.with_name("b"))
    assert path.read_bytes() == b"abc"


def test_a_stopped_process_still_holds_and_a_killed_one_does_not(path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", _READER, str(path)], stdout=subprocess.PIPE) as reader:
        try:
            assert reader.stdout is not None
            assert reader.stdout.readline() == b"held\n"
            reader.send_signal(signal.SIGSTOP)
            assert not take(path, path.with_name("b"))
        finally:
            reader.kill()
            reader.wait()
    assert take(path, path.with_name("b"))
