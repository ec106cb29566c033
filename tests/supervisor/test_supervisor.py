"""Whole runs with every role as a process end as they should, whatever happens, and leave nothing behind."""

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from staleflow.supervisor.drain import DRAIN_ORDER, TIMEOUTS_S
from staleflow.trace.audit.report import audit

pytestmark = pytest.mark.xdist_group("machine")

SIMULATED = Path(__file__).parent.parent.parent / "configs" / "simulated.toml"
QUICK = ("trainer.steps=8", "trainer.checkpoint_every=3", "rollout.simulated.k2=0.001", "trainer.simulated_step_s=0.05")
LONG = ("trainer.steps=100000", "trainer.checkpoint_every=3")


class Run:
    """``staleflow run`` in a folder of its own."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.run_dir = folder / "run"
        command = [sys.executable, "-m", "staleflow.cli", "run", *words, "--run-dir", str(self.run_dir)]
        self.process = subprocess.Popen(
            command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        self.output = ""

    def family(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            found: list[psutil.Process] = psutil.Process(self.process.pid).children(recursive=True)
            return found
        return []

    def until(self, true: Callable[[], bool], seconds: float = 600.0) -> None:
        deadline = time.monotonic() + seconds
        while not true():
            assert self.process.poll() is None, (self.end(), self.output)
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def consumed(self) -> int:
        path = self.run_dir / "trace.jsonl"
        return path.read_bytes().count(b'"ev":"consume"') if path.exists() else 0

    def end(self, seconds: float = 600.0) -> int:
        self.output += self.process.communicate(timeout=seconds)[0]
        return self.process.returncode

    def interrupt(self) -> None:
        """Send Ctrl-C; check the exit code, and that no process is left."""
        family = self.family()
        self.process.send_signal(signal.SIGINT)
        assert self.end(120.0) == 130
        assert psutil.wait_procs(family, timeout=120.0)[1] == []

    def summary(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.run_dir / "summary.json").read_text())
        return found


Start = Callable[..., Run]


@pytest.fixture
def start(short_dir: Path) -> Iterator[Start]:
    runs: list[Run] = []

    def go(*words: str) -> Run:
        runs.append(Run(short_dir, *words))
        return runs[-1]

    yield go
    for run in runs:
        family = run.family()
        run.process.kill()
        run.process.wait()
        assert run.process.stdout is not None
        run.process.stdout.close()
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(family, timeout=120.0)


def test_processes_that_write_no_checkpoint_are_stopped_within_ten_seconds() -> None:
    assert sum(max(TIMEOUTS_S[kind] for kind in kinds) for kinds in DRAIN_ORDER) <= 10


def test_a_run_ends_by_itself_with_a_summary(start: Start) -> None:
    run = start(str(SIMULATED), *QUICK, "--json")
    assert run.end() == 0
    summary = run.summary()
    assert json.loads(run.output.splitlines()[-1]) == summary
    assert (summary["outcome"], summary["steps"], summary["violations"]) == ("finished", 8, 0)
    assert summary["off_policy_max"] <= 2
    assert summary["tokens_trained"] > 0
    assert (summary["restarts"], summary["groups_lost"], summary["failed_steps"]) == ({}, {}, 0)
    assert audit(run.run_dir / "trace.jsonl").violations == []


def test_an_interrupted_run_goes_on_where_it_was(start: Start) -> None:
    run = start(str(SIMULATED), *LONG)
    run.until(lambda: run.consumed() >= 4)
    run.interrupt()
    assert f"resume with: staleflow run --run-dir {run.run_dir} --resume" in run.output
    done = run.consumed()
    assert done < 1000
    again = start("--resume")
    again.until(lambda: again.consumed() >= done + 3)
    again.interrupt()
    assert again.summary()["steps"] >= done + 3
    assert audit(run.run_dir / "trace.jsonl").violations == []


def test_an_interrupt_while_the_model_is_built_leaves_nothing_half(start: Start, short_dir: Path) -> None:
    (short_dir / "slow.py").write_text(
        "import time\ndef build(directory, *, seed):\n    print('reading text', flush=True)\n    time.sleep(600)\n"
    )
    run = start(str(SIMULATED), "rollout.engine=transformers", "model.build=slow.py:build")
    said = run.run_dir / "logs" / "model.out"
    run.until(lambda: said.exists() and "reading text" in said.read_text())
    run.interrupt()
    assert not (run.run_dir / "model").exists()


def test_a_model_that_cannot_be_built_is_told_with_its_last_words(start: Start, short_dir: Path) -> None:
    (short_dir / "broken.py").write_text("def build(directory, *, seed):\n    raise OSError('no space for it')\n")
    run = start(str(SIMULATED), "rollout.engine=transformers", "model.build=broken.py:build")
    assert run.end() == 1
    assert "model.build failed; its output: logs/model.out" in run.output
    assert "OSError: no space for it" in run.output


def test_a_worker_that_refuses_its_configuration_stops_the_run_with_its_words(start: Start, short_dir: Path) -> None:
    (short_dir / "picky.py").write_text(
        "import sys\nif 'probe' not in sys.argv[0]: raise ValueError('not here')\ndef score(*a, **k): return 0.0\n"
    )
    run = start(str(SIMULATED), *LONG, "reward.run=picky.py:score")
    assert run.end() == 2
    assert "reward-0 rejected its configuration" in run.output
    assert "not here" in run.output
    assert "resume with" not in run.output, "a run that is resumed keeps the configuration that was refused"
    assert run.summary()["outcome"] == "failed"


def test_a_dead_worker_and_a_dead_server_are_started_again(start: Start) -> None:
    run = start(str(SIMULATED), *LONG)
    run.until(lambda: run.consumed() >= 2)
    for word in ("rollout", "parameters"):
        victim = next(process for process in run.family() if word in process.cmdline())
        victim.kill()
    done = run.consumed()
    run.until(lambda: run.consumed() >= done + 10)
    run.interrupt()
    assert run.summary()["restarts"] == {"parameters": 1, "rollout-0": 1}
    assert "parameters died with SIGKILL; restarting it" in run.output
    assert audit(run.run_dir / "trace.jsonl").violations == []


def test_nobody_outlives_a_killed_supervisor(start: Start) -> None:
    run = start(str(SIMULATED), *LONG)
    run.until(lambda: run.consumed() >= 1)
    family = run.family()
    assert len(family) >= 7
    run.process.kill()
    assert psutil.wait_procs(family, timeout=120.0)[1] == []
