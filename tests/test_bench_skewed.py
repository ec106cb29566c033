"""The comparison of a real run with its simulation reads both from their traces."""

from pathlib import Path

import pytest

from bench.skewed import CONFIG, read
from staleflow.configs.loading.load import load
from staleflow.sim.simulate import TRACE, simulate


def test_what_is_read_from_a_trace_is_what_the_simulator_says_of_its_run(tmp_path: Path) -> None:
    config = load(CONFIG, ("trainer.steps=10", "rollout.workers=2"))
    result = simulate(config, run_dir=tmp_path)
    seen = read(tmp_path / TRACE, config.staleness.max_staleness)
    assert seen.steps_per_min == pytest.approx(result.steps_per_min)
    assert seen.staleness == pytest.approx(result.staleness_mean)
    assert seen.train_s == pytest.approx(config.trainer.simulated_step_s)
    assert seen.stages_s == pytest.approx(config.simulation.reward_s)
    assert seen.pull_s == pytest.approx(config.simulation.pull_s, abs=0.005)
    assert 0.0 < seen.group_s < seen.longest_s
