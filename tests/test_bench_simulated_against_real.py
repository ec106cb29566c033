"""The comparison of real runs with their simulation reads the costs of a run, and those give the run back."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from bench.role_times import RoleTimes, Used, role_of, sampled
from bench.run_costs import Ran, costs_of, read_run, rescaled
from staleflow.configs.costs import Costs, EngineCosts, SchedulerCosts, ShardCosts, TrainerCosts
from staleflow.configs.loading.cost_file import read_costs
from staleflow.configs.schema import Config
from staleflow.sim.result import Result
from staleflow.sim.simulate import simulate
from tests.sim.configs import config

COSTS = """
[reward]
group_s = 0.05
[trainer]
fixed_s = 0.2
token_s = 0.001
between_s = 0.03
[engine]
k2 = 0.01
[scheduler]
message_s = 0.001
[shard]
fetch_group_s = 0.01
"""
BASE = Costs(
    engine=EngineCosts(k2=0.02),
    scheduler=SchedulerCosts(message_s=0.003),
    shard=ShardCosts(),
    trainer=TrainerCosts(fixed_s=0.4, token_s=0.002),
)
"""The same ratios as in ``COSTS``."""


def measured(result: Result, run_dir: Path, given: Config) -> Ran:
    """Read a simulated run as a real one, with the metrics and the times that its processes would have."""
    steps = [row.ended_s for row in result.steps]
    began_s = [0.0, *steps]
    lines: list[dict[str, Any]] = []
    for row, before_s in zip(result.steps, began_s, strict=False):
        train_s = 0.2 + 0.001 * row.tokens
        lines.append(
            {
                "step": row.step,
                "t": row.ended_s,
                "time/train": train_s,
                "time/wait_for_batch": row.ended_s - before_s - train_s - 0.03,
                "time/publish_total": 0.0,
                "time/pull": 0.0,
                "time/pause": 0.0,
                "rollout/instances": 2,
                "rollout/idle_ratio": result.engine_idle,
            }
        )
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    busy_s = result.scheduler_busy
    samples = [(at / 10, {"scheduler": Used(0.4 * busy_s * at / 10, 0.6 * busy_s * at / 10)}) for at in range(5000)]
    return read_run(run_dir, given, RoleTimes(samples))


def test_the_costs_of_a_run_give_its_simulation(tmp_path: Path) -> None:
    (tmp_path / "costs.toml").write_text(COSTS)
    given = config(steps=20, engines=2, costs=str(tmp_path / "costs.toml"))
    result = simulate(given, run_dir=tmp_path / "run")
    ran = measured(result, tmp_path / "run", given)
    assert 60.0 * ran.steps / ran.seconds == pytest.approx(result.steps_per_min)
    assert ran.trainer_idle == pytest.approx(result.trainer_idle, abs=0.05)
    costs = rescaled(costs_of(ran, BASE, given), ran, result)
    real = read_costs(tmp_path / "costs.toml")
    assert costs.reward is not None
    assert real.reward is not None
    assert costs.reward.group_s == pytest.approx(real.reward.group_s, rel=0.1)
    assert costs.trainer is not None
    assert real.trainer is not None
    assert costs.trainer.token_s == pytest.approx(real.trainer.token_s, rel=0.02)
    assert costs.trainer.between_s == pytest.approx(real.trainer.between_s, abs=0.01)
    assert costs.shard is not None
    assert costs.shard.fetch_group_s == pytest.approx(0.01, rel=0.3)


def test_a_role_is_named_by_the_command_that_starts_it() -> None:
    assert role_of(["python", "-m", "staleflow.cli", "serve", "scheduler", "--run-dir", "x"]) == "scheduler"
    assert role_of(["python", "-m", "staleflow.cli", "attach", "rollout", "--name", "rollout-0"]) == "rollout"
    assert role_of(["python", "-m", "staleflow.cli", "run", "attach"]) == ""


def test_times_are_those_between_two_samples() -> None:
    times = RoleTimes([(float(at), {"train": Used(1.0 * at, 3.0 * at)}) for at in range(10)])
    assert times.between(2.5, 6.5) == {"train": Used(4.0, 12.0)}
    assert times.between(-1.0, 6.5)["train"].slowdown == 4.0


def test_processor_time_of_a_child_is_sampled() -> None:
    busy = [sys.executable, "-c", "while True: pass", "serve", "scheduler"]
    with subprocess.Popen(busy) as process, sampled(os.getpid(), {}) as times:
        try:
            deadline = time.monotonic() + 60.0
            while not any(roles.get("scheduler", Used(0.0, 0.0)).cpu_s > 0.05 for _, roles in times.samples):
                assert time.monotonic() < deadline
                time.sleep(0.05)
        finally:
            process.kill()
