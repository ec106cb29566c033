"""Run directories with short paths: a socket's path may have 107 bytes."""

import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """A run directory that does not exist yet."""
    parent = Path(tempfile.mkdtemp(prefix="sf-"))
    yield parent / "run"
    shutil.rmtree(parent, ignore_errors=True)


@pytest.fixture(autouse=True, scope="session")
def _interruptible() -> None:
    """Whoever starts the tests in the background may have told them to ignore Ctrl-C, and they their children."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
