"""A client that knows only docs/protocol.md generates for a real run, and its groups are trained."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from staleflow.configs.loading.load import addresses, read_run
from staleflow.protocols.wire.messages import PROTOCOL
from tests.process.running import END_S, Run, audited

CLIENT = Path(__file__).parent / "plain_client.py"

pytestmark = pytest.mark.xdist_group("machine")


def test_the_client_needs_nothing_of_staleflow() -> None:
    tree = ast.parse(CLIENT.read_text())
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module).split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert names - sys.stdlib_module_names == {"msgpack", "zmq"}


def test_groups_of_a_client_in_plain_pyzmq_and_msgpack_are_trained(run_dir: Path) -> None:
    with Run(run_dir, "simulated.toml", "trainer.steps=100000", "rollout.workers=1") as run:
        run.wait_for("publish", 1, END_S)
        scheduler = addresses(read_run(run_dir), run_dir).scheduler
        command = [sys.executable, str(CLIENT), scheduler, str(PROTOCOL), "3"]
        client = subprocess.run(command, capture_output=True, text=True, timeout=END_S, check=False)
        assert client.returncode == 0, client.stderr
        leases = json.loads(client.stdout)
        assert len(leases) >= 3
        events = list(run.events())
    audited(run_dir)
    pushed = {e["lease"] for e in events if e["ev"] == "push" and e["worker"].startswith("plain.")}
    assert pushed == set(leases)
    assert pushed & {member["lease"] for e in events if e["ev"] == "seal" for member in e["members"]}
    pulls = [e for e in events if e["ev"] == "pull" and e["worker"].startswith("plain.")]
    assert pulls
    assert all(e["ok"] for e in pulls)
