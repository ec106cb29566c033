"""The code of docs/python.md runs as printed, in the order of the page, while an event loop is running."""

import asyncio
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
from staleflow import api
from staleflow.configs.loading.load import write_resolved

ROOT = Path(__file__).parent.parent.parent
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "python.md").read_text(), re.DOTALL)

pytestmark = pytest.mark.xdist_group("machine")


OWN = ("serve scheduler", "serve trajectories", "serve parameters", "attach rollout", "attach stage")
SMALL = ("model.options.steps=1", "rollout.filter=none", "trainer.batch_size=2")
"""Settings of the run without a trainer: its model has learned nothing, so no group may be filtered."""


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder that a reader of the page works in: beside ``configs``, with a run in progress in ``runs/live`` and a
    run without its trainer in ``runs/own``."""
    path = Path(tempfile.mkdtemp(prefix="sf-"))
    (path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(path)
    own = staleflow.load("configs/smoke.toml", SMALL)
    write_resolved(own, path / "runs" / "own")
    live = ("run", "configs/simulated.toml", "trainer.steps=100000", "--run-dir", "runs/live", "--plain")
    processes = [started(*live), *(started(*words.split(), "--run-dir", "runs/own") for words in OWN)]
    yield path
    for process in processes:
        process.send_signal(signal.SIGINT)
    for process in processes:
        process.wait(120)
    shutil.rmtree(path, ignore_errors=True)


def started(*words: str) -> "subprocess.Popen[bytes]":
    command = (sys.executable, "-m", "staleflow.cli", *words)
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def answers(path: Path) -> bool:
    try:
        with staleflow.connect(path, timeout_s=1.0):
            return True
    except (staleflow.ConfigError, staleflow.Unavailable):
        return False


@pytest.mark.slow
async def test_every_block_of_the_page_runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert asyncio.get_running_loop().is_running()
    namespace: dict[str, object] = {}
    deadline = time.monotonic() + 600
    for run in ("live", "own"):
        while not (answers(folder / "runs" / run) and (run == "live" or (folder / "runs/own/model").is_dir())):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.1)
    for block in BLOCKS:
        exec(compile(block, "docs/python.md", "exec"), namespace)
    assert len(BLOCKS) == 13
    assert (folder / "runs" / "first" / "report.html").is_file()
    assert (folder / "runs" / "own-4" / "model.safetensors").is_file()
    trace = staleflow.Trace.open(folder / "runs" / "own")
    assert trace.check().ok
    assert [event["step"] for event in trace if event["ev"] == "consume"] == [0, 1, 2, 3]
    monkeypatch.delattr(api, "Admin")  # no server is asked any more
    check_words_about_what_has_ended(folder, trace)


def check_words_about_what_has_ended(folder: Path, trace: staleflow.Trace) -> None:
    first = folder / "runs" / "first"
    with pytest.raises(staleflow.ConfigError, match=r"the run has ended \(finished, 4 of 4 steps\)"):
        staleflow.connect(first)
    with pytest.raises(staleflow.ConfigError, match=r"run_dir is .* add resume=True .* or choose a new run_dir$"):
        staleflow.run("configs/simulated.toml", run_dir=first)
    lines = sum(1 for _ in trace)
    assert re.fullmatch(rf"Trace\('{re.escape(str(trace.path))}', {lines:,} lines, run smoke-\w+\)", repr(trace))
