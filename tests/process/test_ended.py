"""Commands and workers that come to a dead run, or to a run without its scheduler, get an error with the reason."""

import contextlib
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

import staleflow
from staleflow.configs.loading.load import load, write_resolved
from tests.process.running import CONFIGS, END_S, Run

pytestmark = pytest.mark.xdist_group("machine")

LONGER = ("trainer.steps=400", "trainer.checkpoint_every=5")


def cli(*words: object) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "staleflow.cli", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=END_S, check=False)


def test_a_run_whose_processes_were_all_killed_is_reported_as_dead_with_the_command_that_resumes_it(
    run_dir: Path,
) -> None:
    with Run(run_dir, "simulated.toml", *LONGER) as run:
        run.wait_for("consume", 5, END_S)
        family = run.family()
        run.process.kill()
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):  # it exits by itself once its supervisor is gone
                process.kill()
        psutil.wait_procs(family, timeout=120)
    steps = [event["version"] for event in run.events() if event["ev"] == "publish"][-1]
    died = f"the run died at step {steps} of 400; resume with: staleflow run --run-dir {run_dir} --resume"
    said = cli("status", run_dir)
    assert (said.returncode, said.stdout, said.stderr) == (1, "", f"staleflow: {died}\n")
    said = cli("top", run_dir)
    assert (said.returncode, died in said.stderr) == (2, True)
    said = cli("report", run_dir)
    assert (said.returncode, said.stdout, said.stderr) == (0, f"{run_dir}/report.html\n", f"staleflow: {died}\n")


def test_a_worker_from_python_is_in_the_run_or_raises_with_the_reason(run_dir: Path) -> None:
    with Run(run_dir, "simulated.toml", *LONGER) as run:
        run.wait_for("consume", 1, END_S)
        with staleflow.connect(run_dir, timeout_s=120) as connected:
            with connected.attach("rollout") as helper:
                rows: list[dict[str, Any]] = connected.status()["workers"]
                (name,) = [row["name"] for row in rows if row["pid"] == helper.pid]
                assert re.fullmatch("rollout-[0-9a-f]{16}", name), "64 random bits"
            with pytest.raises(staleflow.ConfigError, match="rollout-0 belongs to the supervisor of this run"):
                connected.attach("rollout", "rollout-0")
            with pytest.raises(staleflow.ConfigError, match="this run has no such stage; it has reward"):
                connected.attach("stage", stage="judge")


def test_a_worker_reports_what_it_waits_for(run_dir: Path) -> None:
    write_resolved(load(CONFIGS / "simulated.toml"), run_dir)
    command = [sys.executable, "-m", "staleflow.cli", "attach", "rollout", "--run-dir", str(run_dir)]
    said = run_dir / "said.txt"
    with said.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=os.environ)
    try:
        deadline = time.monotonic() + END_S
        told = f"waiting for the scheduler at ipc://{run_dir}/sock/scheduler: no answer yet"
        while told not in said.read_text():
            assert process.poll() is None, said.read_text()
            assert time.monotonic() < deadline
            time.sleep(0.1)
    finally:
        process.kill()
        process.wait()
