"""The example of docs/python.md, an engine of which staleflow knows nothing, generates for a real run."""

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

import staleflow
from tests.process.running import END_S, ROOT, Run, audited

pytestmark = pytest.mark.xdist_group("machine")

EXAMPLE = ROOT / "staleflow" / "examples" / "foreign_engine.py"


def test_the_page_shows_the_example() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "python.md").read_text(), re.DOTALL)
    _, _, code = EXAMPLE.read_text().partition('"""\n\n')
    assert next(block for block in blocks if "RolloutClient" in block) == code


@pytest.mark.long
def test_the_groups_of_the_example_are_trained(run_dir: Path) -> None:
    """The example works until the run drains, and exits with 0."""
    small = ("model.options.steps=1", "rollout.workers=1", "rollout.filter=none", "trainer.steps=100000")
    quick = ("trainer.eval_every=0", "trainer.eval_prompts=0")
    with Run(run_dir, "smoke.toml", *small, *quick) as run:
        run.wait_for("publish", 1, END_S)
        command = [sys.executable, "-W", "error", str(EXAMPLE), str(run_dir)]
        foreign = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        try:
            deadline = time.monotonic() + END_S
            while not trained(run):
                assert foreign.poll() is None, foreign.communicate()
                assert time.monotonic() < deadline
                time.sleep(0.1)
            with staleflow.connect(run_dir) as connected:
                connected.drain()
            output, _ = foreign.communicate(timeout=END_S)
        finally:
            foreign.kill()
        assert foreign.returncode == 0, output
        run.finish(END_S)
    assert run.process.returncode == 0, run.output
    audited(run_dir)


def trained(run: Run) -> set[int]:
    """Return the leases of the example that are in a sealed batch."""
    events = list(run.events())
    pushed = {e["lease"] for e in events if e["ev"] == "push" and e["worker"].startswith("foreign-")}
    return pushed & {member["lease"] for e in events if e["ev"] == "seal" for member in e["members"]}
