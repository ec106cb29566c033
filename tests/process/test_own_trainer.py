"""``trainer.run`` puts a function of the user in the place of the built-in trainer."""

from pathlib import Path

import pytest

from tests.process.running import END_S, ROOT, Run, audited

pytestmark = pytest.mark.xdist_group("machine")

OWN = ROOT / "tests" / "process" / "own_trainer.py"


def test_a_function_of_the_user_trains_the_run(run_dir: Path) -> None:
    with Run(run_dir, "simulated.toml", f"trainer.run={OWN}:train", "trainer.steps=3") as run:
        output = run.finish(END_S)
    assert run.process.returncode == 0, output
    assert run.count("publish") == 4
    assert run.summary()["outcome"] == "finished"
    audited(run_dir, "consume=3")


def test_a_function_that_does_not_exist_is_one_clear_error(run_dir: Path) -> None:
    with Run(run_dir, "simulated.toml", f"trainer.run={OWN}:trian") as run:
        output = run.finish(END_S)
    assert run.process.returncode == 2
    assert "trainer.run" in output
    assert "has no trian" in output
