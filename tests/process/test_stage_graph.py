"""User-defined stages work in a whole run: two in parallel, a reward that waits for both, and a worker that dies."""

import re
from collections import Counter
from pathlib import Path

import pytest

from staleflow.monitor.lanes import overlaps, stage_lines
from staleflow.report.reading import read
from tests.process.running import END_S, Run, audited

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("machine")]

USERS = Path(__file__).parent.parent / "clients" / "user_code" / "users.py"
STEPS = 6


def stage(me: str, other: str, folder: Path) -> str:
    """One of two stages that wait briefly for each other to get the same prompt; sequential stages would never meet."""
    options = f"{{me='{me}', other='{other}', folder='{folder}'}}"
    once = f"batch=1, timeout_s={END_S}, retries=0"
    return f"{{name='{me}', run='{USERS}:meets', options={options}, makes=['score'], {once}}}"


def test_stages_that_need_nothing_of_each_other_work_at_the_same_time_and_survive_a_death(
    run_dir: Path, tmp_path: Path
) -> None:
    overrides = (
        *(f"stage=[{stage('left', 'right', tmp_path)}, {stage('right', 'left', tmp_path)}]", "rollout.workers=1"),
        *(f"reward.run={USERS}:spread", "reward.needs=['left/score']", f"trainer.steps={STEPS}"),
    )
    hold = tmp_path / "hold"
    hold.touch()  # otherwise every group may have passed the stage before it is killed
    with Run(run_dir, "simulated.toml", *overrides) as run:
        run.wait_for("consume", 1, END_S)
        run.kill("attach", "right-0")
        hold.unlink()
        output = run.finish(END_S)
    assert run.process.returncode == 0, output
    summary = run.summary()
    assert (summary["steps"], summary["violations"], summary["outcome"]) == (STEPS, 0, "finished")
    assert (summary["restarts"], summary["groups_lost"]) == ({"right-0": 1}, {})
    audited(run_dir, f"consume={STEPS}", "close=1")
    left, right = ({path.name.partition("-")[2] for path in tmp_path.glob(f"{me}_met-*")} for me in ("left", "right"))
    assert len(left & right) >= STEPS
    _, shown = read(run_dir / "trace.jsonl")
    (seconds,) = [both for *pair, both in overlaps(shown) if "reward" not in pair]
    assert seconds > 0
    workers = {e["worker"].partition(".")[0] for e in run.events() if e["ev"] == "attach" and e["role"] == "stage"}
    assert workers == {"reward-0", "left-0", "right-0"}
    assert not re.search("Traceback", (run_dir / "logs" / "left-0.log").read_text())


def test_the_shipped_graph_trains_and_each_of_its_stages_sees_every_group_that_reaches_it(run_dir: Path) -> None:
    with Run(run_dir, "stages.toml", f"trainer.steps={STEPS}", "trainer.simulated_step_s=0.05") as run:
        output = run.finish(END_S)
    assert run.process.returncode == 0, output
    summary = run.summary()
    assert (summary["steps"], summary["violations"], summary["outcome"]) == (STEPS, 0, "finished")
    assert (summary["restarts"], summary["groups_lost"]) == ({}, {})
    audited(run_dir, f"consume={STEPS}", "close=1")
    lines, occupied = list(stage_lines(run_dir)), run.count("occupy")
    seen = Counter[str]()
    for line in lines:
        seen[line["stage"]] += line["groups"]
    assert occupied >= STEPS * 8
    assert min(seen["length"], seen["repeats"]) >= seen["reward"] >= seen["credit"] >= occupied
    workers = {line["worker"].partition(".")[0] for line in lines}
    assert workers == {"length-0", "repeats-0", "repeats-1", "reward-0", "credit-0"}
