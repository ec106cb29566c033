"""``staleflow launch --on ssh`` with a local shell instead of ssh: machines start, keep and end their own processes."""

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from staleflow.trace.audit.report import audit
from tests.process.running import END_S, drain, name_of

CLUSTER = Path(__file__).parent.parent.parent / "configs" / "cluster.toml"
HERE = json.dumps(["sh", "-c", 'exec sh -c "$1"'])


def free_ports(count: int) -> int:
    """First of ``count`` consecutive free ports."""
    while True:
        first = random.randrange(20_000, 30_000)
        try:
            for port in range(first, first + count):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
            return first
        except OSError:
            continue


@pytest.fixture
def home(short_dir: Path) -> Iterator[Path]:
    yield short_dir
    left = processes(short_dir)
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(left, timeout=120)


def processes(home: Path) -> list[psutil.Process]:
    """Processes of this machine that have the folder in their command line."""
    return [p for p in psutil.process_iter(["cmdline"]) if str(home) in " ".join(p.info["cmdline"] or ())]


def until(condition: Callable[[], object], running: "subprocess.Popen[str] | None" = None) -> None:
    """Wait for the condition while the command runs."""
    deadline = time.monotonic() + END_S
    while not condition():
        assert running is None or running.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)


def started(home: Path, *overrides: str) -> "subprocess.Popen[str]":
    words = ["launch", "--on", "ssh", str(CLUSTER), "--run-dir", str(home / "run"), "--json"]
    words += ['launch.hosts=["127.0.0.1", "127.0.0.1", "127.0.0.1"]', f"launch.shell={HERE}"]
    words += [f"launch.port={free_ports(3)}", "trainer.simulated_step_s=0.05", *overrides]
    return subprocess.Popen(
        [sys.executable, "-m", "staleflow.cli", *words],
        env={**os.environ, "HOME": str(home)},
        cwd=home,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def test_what_dies_on_a_machine_is_started_there_again_and_everything_ends_with_the_run(home: Path) -> None:
    running = started(home, "trainer.steps=100000", "scheduler.lease_s=2")
    trace, logged = home / "run" / "trace.jsonl", home / "run" / "logs" / "rollout-machine-1.out"

    def pushed() -> bool:
        lines = trace.read_bytes().split(b"\n")[:-1] if trace.exists() else []
        return any(e["ev"] == "push" and name_of(e["worker"]) == "rollout-3" for e in map(json.loads, lines))

    until(pushed, running)
    words = ("rollout-3", "relay-1")
    victims = {word: p for p in processes(home) for word in words if word in p.info["cmdline"]}
    assert victims.keys() == set(words)
    for victim in victims.values():
        victim.send_signal(signal.SIGKILL)
    until(lambda: all(f"{word} restarted (restart 1)" in logged.read_text() for word in words), running)
    drain(home / "run")
    said, _ = running.communicate(timeout=END_S)
    summary = json.loads(said)
    assert (running.returncode, summary["outcome"]) == (0, "drained")
    assert "rollout-3 died with -9" in logged.read_text()
    assert audit(trace).num_violations == 0
    until(lambda: not processes(home))
