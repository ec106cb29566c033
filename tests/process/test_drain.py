"""A drained run ends like a run that has trained every step, and continues when it is resumed."""

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import staleflow
from staleflow.configs.loading.load import load, read_run, write_resolved
from staleflow.net.errors import Unavailable
from tests.process.running import CONFIGS, END_S, Run, audited

pytestmark = pytest.mark.xdist_group("machine")

LONGER = ("trainer.steps=400", "trainer.checkpoint_every=5")


def cli(*words: object) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "staleflow.cli", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=END_S, check=False)


def test_a_drained_run_ends_cleanly_and_continues_when_it_is_resumed(run_dir: Path) -> None:
    with Run(run_dir, "simulated.toml", *LONGER) as run:
        run.wait_for("consume", 5, END_S)
        family = run.family()
        asked = cli("drain", run_dir, "--why", "night")
        assert (asked.returncode, asked.stderr) == (0, "")
        assert asked.stdout.endswith(": draining; staleflow status --why shows what is left\n")
        output = run.finish(END_S)
        assert psutil.wait_procs(family, timeout=120)[1] == []
    assert run.process.returncode == 0, output
    summary = run.summary()
    steps = summary["steps"]
    assert (summary["outcome"], summary["error"], summary["restarts"]) == ("drained", "", {})
    assert 5 <= steps < 400
    how = f"staleflow run --run-dir {run_dir} --resume"
    assert f"drained at step {steps} of 400; resume with: {how}" in output
    assert "died" not in output
    assert (run_dir / "checkpoints" / str(steps) / "checkpoint.json").is_file()
    sealed = {event["step"] for event in run.events() if event["ev"] == "seal"}
    assert sealed == set(range(steps)), "every sealed batch is trained"
    close = [event for event in run.events() if event["ev"] == "close"]
    assert [(event["why"], event["reserved"]) for event in close] == [("drained", 0)]
    said = cli("status", run_dir, "--why")
    assert (said.returncode, said.stdout) == (
        0,
        f"the run was drained: {steps} of 400 steps trained; resume with: {how}\n",
    )
    late = cli("drain", run_dir)
    ended = f"the run has ended: drained, {steps} of 400 steps; resume with: {how}"
    assert (late.returncode, late.stdout, late.stderr) == (2, "", f'staleflow: run is "{run_dir}"; {ended}\n')
    with Run(run_dir, "simulated.toml", *LONGER, "--resume") as run:
        run.wait_for("consume", steps + 3, END_S)
    audited(run_dir, "open=2", f"consume={steps + 3}")
    assert run.count("rollback") == 0


def test_a_finished_run_trains_more_steps_when_it_is_resumed_with_more(run_dir: Path) -> None:
    with Run(run_dir, "simulated.toml", "trainer.steps=6") as run:
        output = run.finish(END_S)
    assert run.process.returncode == 0, output
    command = [sys.executable, "-m", "staleflow.cli", "run", "--resume", str(run_dir), "--plain"]
    again = subprocess.run([*command, "trainer.steps=9"], capture_output=True, text=True, timeout=END_S, check=False)
    assert again.returncode == 0, again.stdout + again.stderr
    summary = run.summary()
    assert (summary["outcome"], summary["steps"], summary["steps_wanted"], summary["violations"]) == (
        *("finished", 9, 9),
        0,
    )
    assert read_run(run_dir).trainer.steps == 9
    audited(run_dir, "open=2", "consume=9", "close=2")
    assert run.count("rollback") == 0
    shas = [event["config_sha"] for event in run.events() if event["ev"] == "open"]
    assert len(set(shas)) == 2, "the trace has the configuration of each session"
    fewer = cli("run", "--resume", run_dir, "trainer.steps=8")
    assert (fewer.returncode, fewer.stderr) == (
        2,
        f"staleflow: trainer.steps is 8; 9 steps are trained already in {run_dir}: use at least as many\n",
    )
    other = cli("run", "--resume", run_dir, "trainer.lr=0.5")
    assert (other.returncode, other.stderr) == (
        2,
        "staleflow: trainer.lr is 0.5; a run keeps its configuration: --resume may change trainer.steps, "
        "trainer.nproc, trainer.backend, trainer.gpus, rollout.workers, rollout.gpus, rollout.elastic.min_workers, "
        "rollout.elastic.max_workers\n",
    )
    assert read_run(run_dir).trainer.steps == 9


class ByHand:
    """Every process of a run, each started as a user would start it in a separate terminal."""

    SERVERS = (("serve", "scheduler"), ("serve", "trajectories"), ("serve", "parameters"))
    WORKERS = (("attach", "rollout"), ("attach", "stage"), ("attach", "train"))

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, verb: str, role: str, *words: str) -> None:
        command = [sys.executable, "-m", "staleflow.cli", verb, role, "--run-dir", str(self.run_dir), *words]
        output = (self.run_dir / f"{role}.txt").open("ab")
        with output:
            self.processes[role] = subprocess.Popen(command, stdout=output, stderr=output)

    def ended(self, *roles: str) -> dict[str, int]:
        return {role: self.processes[role].wait(END_S) for role in roles}

    def connected(self) -> staleflow.Run:
        deadline = time.monotonic() + END_S
        while True:
            with contextlib.suppress(staleflow.ConfigError, Unavailable):
                return staleflow.connect(self.run_dir, timeout_s=120)
            assert time.monotonic() < deadline
            time.sleep(0.1)

    def until_trained(self, steps: int) -> None:
        deadline = time.monotonic() + END_S
        with self.connected() as run:
            while run.status()["version"] < steps:
                assert time.monotonic() < deadline
                time.sleep(0.1)


@pytest.fixture
def by_hand(run_dir: Path) -> Iterator[ByHand]:
    run_dir.mkdir()
    run = ByHand(run_dir)
    yield run
    for process in run.processes.values():
        process.kill()
        process.wait()


def test_a_drained_run_whose_processes_were_started_by_hand_ends_too(by_hand: ByHand, run_dir: Path) -> None:
    write_resolved(load(CONFIGS / "simulated.toml", LONGER), run_dir)
    for words in (*by_hand.SERVERS, *by_hand.WORKERS):
        by_hand.start(*words)
    by_hand.until_trained(4)
    with by_hand.connected() as run:
        run.drain("night")
        assert by_hand.ended("train", "rollout", "stage") == {"train": 0, "rollout": 0, "stage": 0}
        deadline = time.monotonic() + END_S
        while not (status := run.status())["closed"]:
            assert time.monotonic() < deadline
            time.sleep(0.1)
    assert (status["phase"], status["drained"], status["why"]) == ("drained", "night", "the run was drained: night")
    at = status["version"]
    by_hand.processes["scheduler"].kill()  # the drain was acknowledged, so it must survive a kill
    by_hand.processes["scheduler"].wait()
    by_hand.start("serve", "scheduler")
    by_hand.start("attach", "rollout")
    assert by_hand.ended("rollout") == {"rollout": 0}
    assert b"the run is over" in (run_dir / "rollout.txt").read_bytes()
    deadline = time.monotonic() + END_S
    while (shown := cli("status", run_dir, "--json")).returncode != 0:  # within the command's time limit
        assert time.monotonic() < deadline, shown.stderr
    said = json.loads(shown.stdout)
    assert (said["phase"], said["drained"], said["closed"], said["version"]) == ("drained", "night", True, at)
    for role in ("scheduler", "trajectories", "parameters"):
        by_hand.processes[role].send_signal(signal.SIGTERM)
    assert set(by_hand.ended("scheduler", "trajectories", "parameters").values()) == {0}
    by_hand.start("serve", "scheduler", "--resume", f"trainer.steps={at + 2}")
    with by_hand.connected() as run:  # the other processes find the configuration that the scheduler writes
        assert (run.config.trainer.steps, run.status()["drained"]) == (at + 2, "")
    for words in (*by_hand.SERVERS[1:], *by_hand.WORKERS):
        by_hand.start(*words)
    assert by_hand.ended("train", "rollout", "stage") == {"train": 0, "rollout": 0, "stage": 0}
    audited(run_dir, f"consume={at + 2}", "open=3")
