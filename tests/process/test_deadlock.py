"""A run that can no longer make progress ends by itself and reports the reason."""

from pathlib import Path

import pytest

from tests.process.running import END_S, Run, audited

pytestmark = pytest.mark.xdist_group("machine")


def test_a_filter_that_keeps_nothing_of_the_only_epoch_ends_the_run_with_the_reason(run_dir: Path) -> None:
    """Random tokens are never right, so all rewards of a group are equal."""
    prompts = run_dir.parent / "prompts.jsonl"
    prompts.write_text("".join(f'{{"prompt": "{n}+1=", "answer": "{n + 1}"}}\n' for n in range(8)))
    few = ("prompts.source=", f"prompts.path={prompts}", "prompts.epochs=1", "trainer.batch_size=2", "trainer.steps=4")
    quick = ("rollout.filter=zero_spread", "rollout.workers=1", "rollout.simulated.mean_tokens=8")
    with Run(run_dir, "simulated.toml", *few, *quick) as run:
        output = run.finish(END_S)
    assert run.process.returncode == 1, output
    why = (
        "step 0 can never be trained: 0 of 2 groups are ready and the prompts are used up: 1 x 8, 8 filtered. "
        'Possible fixes: raise prompts.epochs (0 repeats the prompts without end), or set rollout.filter to "none"'
    )
    assert run.summary()["error"] == why
    assert f"the run failed: {why}" in output
    assert audited(run_dir)["release:filtered"] == 8
