"""A run whose rollout workers have an engine of the user."""

from pathlib import Path

import pytest

from tests.process.running import END_S, ROOT, Run, audited

pytestmark = pytest.mark.xdist_group("machine")

ENGINES = ROOT / "tests" / "clients" / "rollout" / "engines" / "user_engines.py"


def test_groups_of_an_engine_of_the_user_are_trained(run_dir: Path) -> None:
    engine = (f"rollout.engine={ENGINES}:Echo", "rollout.engine_options={offset=5}", "rollout.workers=1")
    with Run(run_dir, "simulated.toml", *engine, "trainer.steps=3", "trainer.simulated_step_s=0.01") as run:
        output = run.finish(END_S)
    assert run.process.returncode == 0, output
    audited(run_dir, "consume=3")
    pushes = [e for e in run.events() if e["ev"] == "push"]
    assert pushes
    assert {segment["tokens"] for e in pushes for segment in e["segments"]} == {4 * 3}, "four samples of three tokens"
