"""``staleflow launch --on ssh`` runs on four hosts that share only a network, one of them behind a slow link."""

import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from staleflow.trace.audit.report import audit
from tests.process.hosts import Hosts, possible

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not possible(), reason="network namespaces need root and iproute2"),
]

CLUSTER = Path(__file__).parent.parent.parent / "configs" / "cluster.toml"


@pytest.fixture
def hosts(short_dir: Path) -> Iterator[Hosts]:
    with Hosts(short_dir / "hosts", 4) as hosts:
        yield hosts


def launch(hosts: Hosts, folder: Path, *overrides: str) -> "subprocess.Popen[bytes]":
    """Launch from the first host, which has the servers. The trainer is on the second, engines on the other two."""
    head, *others = hosts.addresses
    command = [
        sys.executable,
        "-m",
        "staleflow.cli",
        "launch",
        "--on",
        "ssh",
        str(CLUSTER),
        "--run-dir",
        "run",
        "--plain",
    ]
    command += [f"launch.hosts={json.dumps(others)}", f"launch.shell={json.dumps([str(hosts.shell)])}", *overrides]
    return hosts.start(head, command, folder / "said")


def events(run_dir: Path) -> list[dict[str, Any]]:
    path = run_dir / "trace.jsonl"
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]] if path.exists() else []


def test_a_run_over_four_hosts_with_a_slow_link_keeps_its_promises(hosts: Hosts, short_dir: Path) -> None:
    head, _, near, far = hosts.addresses
    hosts.slow(far, mbit=20, delay_ms=20)
    run_dir = short_dir / "hosts" / head / "home" / "run"
    running = launch(hosts, short_dir)
    assert running.wait(timeout=200) == 0, (short_dir / "said").read_text()

    told = audit(run_dir / "trace.jsonl")
    assert told.num_violations == 0
    seen = events(run_dir)
    assert sum(event["ev"] == "consume" for event in seen) == 30
    attached = {event["worker"].split(".")[0] for event in seen if event["ev"] == "attach"}
    assert attached >= {*(f"rollout-{n}" for n in range(4)), "relay-0", "relay-1", "trainer", "reward-0"}
    pushed = Counter(event["worker"].split(".")[0] for event in seen if event["ev"] == "push")
    assert set(pushed) == {f"rollout-{n}" for n in range(4)}
    wrote = Counter[str]()
    for event in seen:
        if event["ev"] == "push":
            wrote[near if event["worker"][:9] in ("rollout-0", "rollout-1") else far] += event["bytes"]
    assert all(hosts.sent(host) > wrote[host] > 0 for host in (near, far)), "payload crossed the network"
    logs = (run_dir / "logs" / "rollout-machine-1.out").read_text()
    assert "rollout-3 INFO" in logs, "what a host's processes say is collected"
    keys = short_dir / "hosts" / far / "home" / ".staleflow" / "run"
    assert sorted(path.name for path in keys.iterdir()) == ["allowed.toml", "rollout.key", "server.key"]
    assert {path.stat().st_mode & 0o777 for path in keys.iterdir()} == {0o600}


def test_a_host_that_is_cut_off_loses_its_leases_and_comes_back(hosts: Hosts, short_dir: Path) -> None:
    head, *_, far = hosts.addresses
    run_dir = short_dir / "hosts" / head / "home" / "run"
    slow = "rollout.simulated.k2=0.03"  # seconds per decoding step: every engine always has samples in progress
    running = launch(hosts, short_dir, "scheduler.lease_s=3", "trainer.steps=60", slow)
    deadline = time.monotonic() + 60
    while sum(event["ev"] == "consume" for event in events(run_dir)) < 5:
        assert running.poll() is None, (short_dir / "said").read_text()
        assert time.monotonic() < deadline, (short_dir / "said").read_text()
        time.sleep(0.2)
    hosts.cut(far, 8.0)
    assert running.wait(timeout=300) == 0, (short_dir / "said").read_text()

    assert audit(run_dir / "trace.jsonl").num_violations == 0
    seen = events(run_dir)
    lost = [at for at, event in enumerate(seen) if event["ev"] == "release" and event["why"] == "expired"]
    assert lost, "its leases ran out"
    again = {event["worker"].split(".")[0] for event in seen[lost[-1] :] if event["ev"] == "push"}
    assert {"rollout-2", "rollout-3"} <= again, "and it works again"
