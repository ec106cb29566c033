"""docs/python.md: its code runs as it stands there, in the order of the page, while an event loop is running."""

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import staleflow
from staleflow.runtime.errors import Unavailable

ROOT = Path(__file__).parent.parent.parent
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "python.md").read_text(), re.DOTALL)

pytestmark = pytest.mark.xdist_group("machine")


@pytest.fixture
def folder() -> Iterator[Path]:
    """Where a reader of the page is: beside ``configs``, with a run under way in ``runs/live``."""
    path = Path(tempfile.mkdtemp(prefix="sf-"))
    (path / "configs").symlink_to(ROOT / "configs")
    words = ("run", "configs/simulated.toml", "trainer.steps=100000", "--run-dir", "runs/live", "--plain")
    live = subprocess.Popen([sys.executable, "-m", "staleflow.cli", *words], cwd=path, stdout=subprocess.DEVNULL)
    before = Path.cwd()
    os.chdir(path)
    yield path
    os.chdir(before)
    live.send_signal(signal.SIGINT)
    live.wait(30)
    shutil.rmtree(path)


def answers(path: Path) -> bool:
    try:
        with staleflow.connect(path, timeout_s=1.0):
            return True
    except (staleflow.ConfigError, Unavailable):
        return False


async def test_every_block_of_the_page_runs(folder: Path) -> None:
    assert asyncio.get_running_loop().is_running()
    namespace: dict[str, object] = {}
    deadline = time.monotonic() + 30
    while not answers(folder / "runs" / "live"):
        assert time.monotonic() < deadline
    for block in BLOCKS:
        exec(compile(block, "docs/python.md", "exec"), namespace)
    assert len(BLOCKS) == 6
    assert (folder / "runs" / "first" / "report.html").is_file()
