"""A real service for the trainer's tests: its servers, one simulated engine and one reward worker, each a process."""

import contextlib
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

from staleflow.configs.loading.load import addresses, load, write_resolved
from staleflow.configs.schema import Config

REWARDS = Path(__file__).parent.parent / "user_code" / "rewards.py"

CONFIG = f"""
name = "test"
[prompts]
path = "prompts.jsonl"
[reward]
run = "{REWARDS}:length"
[staleness]
max_staleness = 1
[rollout]
engine = "simulated"
group_size = 2
max_new_tokens = 16
filter = "none"
simulated = {{ mean_tokens = 6.0, k2 = 0.0002, k3 = 0.0 }}
[trainer]
backend = "simulated"
batch_size = 3
steps = 6
checkpoint_every = 2
simulated_step_s = 0.02
eval_prompts = 0
[trajectories]
shards = 2
[scheduler]
lease_s = 5.0
[parameters]
store = "disk" # tests look into the files
"""


class Service:
    """Every process of a run except the trainer. Leaving the context removes everything."""

    def __init__(self, folder: Path, *overrides: str) -> None:
        (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"p{n}"}) + "\n" for n in range(50)))
        (folder / "config.toml").write_text(CONFIG)
        self.run_dir = folder / "run"
        self.config: Config = load(folder / "config.toml", overrides)
        write_resolved(self.config, self.run_dir)
        self.address = addresses(self.config, self.run_dir).scheduler
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> "Service":
        self.start("scheduler", "serve", "scheduler")
        for shard in range(self.config.trajectories.shards):
            self.start(f"trajectories-{shard}", "serve", "trajectories", "--shard", str(shard))
        self.start("parameters", "serve", "parameters")
        self.start("rollout", "attach", "rollout", "--name", "rollout-0")
        self.start("reward", "attach", "stage", "--name", "reward-0")
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End every process; the files stay."""
        for process in self.processes.values():
            process.send_signal(signal.SIGTERM)
        for process in self.processes.values():
            try:
                process.wait(timeout=120)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def start(self, name: str, *words: str) -> subprocess.Popen[bytes]:
        """Start one process of the run."""
        command = [sys.executable, "-m", "staleflow.cli", *words, "--run-dir", str(self.run_dir)]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        self.processes[name] = process
        return process

    def start_trainer(self) -> subprocess.Popen[bytes]:
        return self.start("trainer", "attach", "train", "--name", "trainer")

    def trace(self, ev: str) -> list[dict[str, Any]]:
        """Events of one kind so far, from complete lines only."""
        try:
            lines = (self.run_dir / "trace.jsonl").read_bytes().split(b"\n")[:-1]
        except FileNotFoundError:
            return []
        return [event for line in lines if (event := json.loads(line))["ev"] == ev]

    def wait_for(self, ev: str, count: int, timeout_s: float = 60.0) -> list[dict[str, Any]]:
        """Wait until the trace holds ``count`` events of a kind."""
        deadline = time.monotonic() + timeout_s
        while len(found := self.trace(ev)) < count:
            assert time.monotonic() < deadline, f"{len(found)} of {count} {ev} in {timeout_s} s"
            time.sleep(0.05)
        return found


@contextlib.contextmanager
def serving(*overrides: str) -> Generator[Service]:
    """A service in a folder with a short path (a socket's path is limited to 107 bytes)."""
    folder = Path(tempfile.mkdtemp(prefix="sf-"))
    try:
        with Service(folder, *overrides) as service:
            yield service
    finally:
        shutil.rmtree(folder, ignore_errors=True)
