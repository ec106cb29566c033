# pyright: basic, reportMissingImports=false
"""``staleflow launch --on ray`` keeps and ends the machines it placed, on a local cluster of four Ray nodes."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from staleflow.trace.audit.report import audit

ray = pytest.importorskip("ray", reason="needs the extra ray")
pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]

CLUSTER = Path(__file__).parent.parent.parent / "configs" / "cluster.toml"


@pytest.fixture
def nodes() -> Iterator[Any]:
    """A head node without capacity for machines, and three nodes with capacity for one machine each."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    for _ in range(3):
        cluster.add_node(num_cpus=3)
    yield cluster
    cluster.shutdown()


@contextmanager
def launched(nodes: Any, folder: Path, *overrides: str) -> Generator["subprocess.Popen[bytes]"]:
    words = ["launch", "--on", "ray", str(CLUSTER), "--run-dir", str(folder / "run"), "--plain", *overrides]
    command = [sys.executable, "-m", "staleflow.cli", *words, "launch.port=26551"]
    with (folder / "said").open("ab") as said:
        environment = {**os.environ, "RAY_ADDRESS": nodes.address}
        running = subprocess.Popen(
            command, env=environment, cwd=folder, stdin=subprocess.DEVNULL, stdout=said, stderr=said
        )
    try:
        yield running
    finally:
        running.terminate()
        running.wait(timeout=30)


def events(folder: Path) -> list[dict[str, Any]]:
    path = folder / "run" / "trace.jsonl"
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]] if path.exists() else []


def test_machines_are_placed_on_nodes_and_end_with_the_run(nodes: Any, short_dir: Path) -> None:
    with launched(nodes, short_dir) as running:
        assert running.wait(timeout=150) == 0, (short_dir / "said").read_text()
    assert audit(short_dir / "run" / "trace.jsonl").num_violations == 0
    attached = {event["worker"].split(".")[0] for event in events(short_dir) if event["ev"] == "attach"}
    assert attached >= {*(f"rollout-{n}" for n in range(4)), "relay-0", "relay-1", "trainer", "reward-0"}
    told = (short_dir / "run" / "logs" / "ray.out").read_text()
    assert all(f"{name} started at" in told for name in ("trainer-machine-0", "rollout-machine-0", "rollout-machine-1"))


def test_a_lost_node_is_replaced_and_its_machine_starts_there(nodes: Any, short_dir: Path) -> None:
    told = short_dir / "run" / "logs" / "ray.out"
    deadline = time.monotonic() + 90
    with launched(nodes, short_dir, "trainer.steps=120", "scheduler.lease_s=3") as running:
        while sum(event["ev"] == "consume" for event in events(short_dir)) < 5:
            assert running.poll() is None, (short_dir / "said").read_text()
            assert time.monotonic() < deadline, (short_dir / "said").read_text()
            time.sleep(0.2)
        (lost,) = nodes_of("rollout-machine-1", told)
        nodes.add_node(num_cpus=3)
        nodes.remove_node(next(node for node in nodes.worker_nodes if node.node_id == lost), allow_graceful=False)
        assert running.wait(timeout=180) == 0, (short_dir / "said").read_text() + told.read_text()
    first, *later = nodes_of("rollout-machine-1", told)
    assert (first, lost in later, later != []) == (lost, False, True)
    assert audit(short_dir / "run" / "trace.jsonl").num_violations == 0


def nodes_of(machine: str, told: Path) -> list[str]:
    """Nodes on which a machine was started, in order."""
    return re.findall(rf"{machine} started at .*, node (\w+)", told.read_text())
