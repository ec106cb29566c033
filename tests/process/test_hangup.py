"""A run whose terminal closes or whose connection ends drains and writes its summary."""

import json
import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.process.running import CONFIGS, END_S
from tests.process.terminal import own_terminal

pytestmark = pytest.mark.xdist_group("machine")


@pytest.mark.parametrize("words", [(), ("--plain",)], ids=["live", "plain"])
def test_a_run_whose_terminal_is_closed_drains_and_has_its_summary(run_dir: Path, words: tuple[str, ...]) -> None:
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "staleflow.cli", "run", str(CONFIGS / "simulated.toml"), "trainer.steps=100000"]
    run = subprocess.Popen(
        [*command, "--run-dir", str(run_dir), *words], stdin=slave, stdout=slave, stderr=slave, preexec_fn=own_terminal
    )
    os.close(slave)
    try:
        trace, deadline = run_dir / "trace.jsonl", time.monotonic() + END_S
        while not trace.exists() or trace.read_bytes().count(b'"ev":"consume"') < 2:
            assert run.poll() is None
            assert time.monotonic() < deadline
            if select.select([master], [], [], 0.05)[0]:
                os.read(master, 65536)
        family = psutil.Process(run.pid).children(recursive=True)
        os.close(master)
        assert run.wait(120) == 130
    finally:
        run.kill()
        run.wait()
    assert psutil.wait_procs(family, timeout=120)[1] == []
    assert json.loads((run_dir / "summary.json").read_text())["outcome"] == "interrupted"
