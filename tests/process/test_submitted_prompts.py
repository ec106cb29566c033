"""A client submits the prompts of a real run whose scheduler and trainer are killed: every row is trained once."""

import re
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import staleflow
from staleflow.protocols.wire.messages import SUBMITTED_ROWS
from tests.process.running import END_S, ROOT, Run, audited

pytestmark = pytest.mark.xdist_group("machine")

SUBMITTED = ("prompts.source=", "prompts.submitted=true")
BATCH, STEPS = 8, 12


def rows(part: int) -> list[dict[str, str]]:
    return [{"prompt": f"{part}+{number}=", "answer": str(part + number)} for number in range(BATCH)]


def trained(run: Run) -> Counter[int]:
    """Return how often the surviving history of the run has trained each row."""
    members, steps = dict[int, list[int]](), dict[int, list[int]]()
    for event in run.events():
        match event["ev"]:
            case "seal":
                members[event["batch"]] = [member["group"] % SUBMITTED_ROWS for member in event["members"]]
            case "consume":
                steps[event["step"]] = members[event["batch"]]
            case "rollback":
                steps = {step: its for step, its in steps.items() if step < event["to_version"]}
            case _:
                pass
    return Counter(row for its in steps.values() for row in its)


def test_the_page_shows_the_example() -> None:
    example = ROOT / "staleflow" / "examples" / "curriculum.py"
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "python.md").read_text(), re.DOTALL)
    _, _, code = example.read_text().partition('"""\n\n')
    assert next(block for block in blocks if "PromptClient" in block) == code


def test_every_row_is_trained_once_although_the_scheduler_and_the_trainer_are_killed(run_dir: Path) -> None:
    small = (f"trainer.steps={STEPS}", "trainer.checkpoint_every=6", "rollout.simulated.mean_tokens=16")
    with Run(run_dir, "simulated.toml", *SUBMITTED, *small) as run, ThreadPoolExecutor(1) as thread:
        run.wait_for("publish", 1, END_S)
        with staleflow.PromptClient(run_dir) as client:
            numbers = [client.submit(rows(part), id=f"part-{part}") for part in range(4)]
            run.wait_for("consume", 2, END_S)
            submitting = thread.submit(
                lambda: [client.submit(rows(part), id=f"part-{part}") for part in range(4, STEPS - 1)]
            )
            run.kill("serve", "scheduler")
            numbers += submitting.result(END_S)
            # Beyond the checkpoint of version 6; version 12 waits for the last rows.
            run.wait_for("consume", 7, END_S)
            run.kill("attach", "train")  # the steps since its checkpoint are trained again
            again = [client.submit(rows(part), id=f"part-{part}") for part in range(STEPS - 1)]
            assert again == numbers
            numbers.append(client.finish(rows(STEPS - 1), id="last"))
            assert [number for part in numbers for number in part] == list(range(BATCH * STEPS))
            newest, outcomes = 0, list[staleflow.Outcome]()
            while new := client.outcomes(newest):
                newest, outcomes = new[-1].number, outcomes + new
        run.finish(END_S)
    assert run.process.returncode == 0, run.output
    assert trained(run) == dict.fromkeys(range(BATCH * STEPS), 1)
    assert {outcome.row for outcome in outcomes} == set(range(BATCH * STEPS))
    assert {(outcome.result, outcome.reward) for outcome in outcomes} == {("trained", 0.0)}
    assert run.count("rollback") == 1
    assert audited(run_dir)["open"] == 2


@pytest.mark.long
def test_the_example_of_a_curriculum_trains_until_the_run_ends(run_dir: Path) -> None:
    with Run(run_dir, "smoke.toml", *SUBMITTED, "trainer.steps=6", "trainer.eval_every=0") as run:
        run.wait_for("publish", 1, END_S)
        command = [sys.executable, "-W", "error", "-m", "staleflow.examples.curriculum", str(run_dir)]
        example = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        try:
            run.finish(END_S)
            output, _ = example.communicate(timeout=END_S)
        finally:
            example.kill()
    assert run.process.returncode == 0, run.output
    assert example.returncode == 0, output
    audited(run_dir)
