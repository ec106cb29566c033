"""Run directories with short paths: the path of a Unix socket is limited to 107 bytes."""

import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """Path of a run directory that does not exist yet."""
    parent = Path(tempfile.mkdtemp(prefix="sf-"))
    yield parent / "run"
    shutil.rmtree(parent, ignore_errors=True)


@pytest.fixture(autouse=True, scope="session")
def _interruptible() -> None:
    """Restore Ctrl-C: tests that are started in the background, and their children, may inherit an ignored SIGINT."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
