"""A finished run continues with more steps on another backend and another number of ranks."""

from pathlib import Path

import pytest

from tests.process.running import END_S, Run, audited

pytestmark = pytest.mark.xdist_group("machine")

SMOKE = ("trainer.checkpoint_every=2", "trainer.eval_prompts=0", "rollout.workers=1")


def test_a_run_of_one_process_continues_sharded_over_two_ranks(run_dir: Path) -> None:
    with Run(run_dir, "smoke.toml", *SMOKE, "trainer.steps=3") as run:
        run.finish(END_S)
    sharded = ("trainer.steps=5", "trainer.backend=fsdp", "trainer.nproc=2")
    with Run(run_dir, "smoke.toml", *SMOKE, *sharded, "--resume") as run:
        output = run.finish(END_S)
    assert run.process.returncode == 0, output
    assert run.summary()["steps"] == 5
    assert run.summary()["restarts"] == {}
    audited(run_dir, "open=2", "consume=5")
    assert f"resumed from {run_dir}/checkpoints/3" in (run_dir / "logs" / "trainer.log").read_text()
    assert len([*(run_dir / "checkpoints" / "5" / "optimizer").iterdir()]) == 2
