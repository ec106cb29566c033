"""``staleflow launch --on ssh`` with a local shell instead of ssh: machines start, keep and end their own processes."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from staleflow.trace.audit.report import audit
from tests.process.running import END_S

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
    for process in psutil.process_iter(["cmdline"]):
        if str(short_dir) in " ".join(process.info["cmdline"] or ()):
            process.kill()


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
    running = started(home, "trainer.steps=120", "scheduler.lease_s=2")
    victims: dict[str, psutil.Process] = {}
    deadline = time.monotonic() + END_S
    while len(victims) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
        pushed = home / "run" / "trace.jsonl"
        if not pushed.exists() or b'"ev":"push"' not in pushed.read_bytes():
            continue
        for process in psutil.process_iter(["cmdline"]):
            victims |= {name: process for name in ("rollout-3", "relay-1") if name in (process.info["cmdline"] or ())}
    assert len(victims) == 2
    for victim in victims.values():
        victim.send_signal(signal.SIGKILL)
    said, _ = running.communicate(timeout=END_S)
    summary = json.loads(said)
    assert (running.returncode, summary["outcome"], summary["steps"]) == (0, "finished", 120)
    told = (home / "run" / "logs" / "rollout-machine-1.out").read_text()
    assert "rollout-3 died with -9" in told
    assert "rollout-3 restarted (restart 1)" in told
    assert "relay-1 restarted (restart 1)" in told
    assert audit(home / "run" / "trace.jsonl").num_violations == 0
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(home) in " ".join(p.info["cmdline"] or ())]
