"""The presets of three rules reproduce the results of the StaleFlow authors' simulator, with its timing.

psrl-project/DryRun-RL, 60 steps: 8 engines, 64 groups of one trajectory a batch, lognormal(7.2, 0.9) tokens up to
16,384, prompts of 512, 12.4 ms a step at any load, a trainer of 20 s, weights on all engines when a step starts. Over
seeds 0, 1, 2 and 42, its results at a bound of 1 were: PSRL 0.835, 0.767, 0.809, 0.787 steps a minute; AReaL 2.954 to
2.962 with groups 10 versions old; ROLL 2.954 to 2.962 with 17.1 to 17.6 % of its trajectories discarded.
"""

import math
from statistics import mean

import pytest

from staleflow.configs.schema import Config
from staleflow.sim.peers.run import PeerRun
from tests.sim.configs import config

SEEDS = (0, 1, 2)


def tail(seed: int, max_staleness: int = 1) -> Config:
    return config(
        steps=60,
        batch_size=64,
        group_size=1,
        max_staleness=max_staleness,
        engines=8,
        slots=256,
        train_s=20.0,
        longest=16_384,
        seed=seed,
        lengths={"mean_tokens": math.exp(7.2 + 0.9**2 / 2), "sigma": 0.9, "k2": 0.0124},
        prompt_tokens=512,
        publish="start",
    )


def ran(name: str, of: Config) -> PeerRun:
    run = PeerRun(of, name)
    run.run()
    return run


def steps_per_min(run: PeerRun) -> float:
    """Steps a minute by the authors' definition, which includes the time of the first batch."""
    return 60 * len(run.rows) / run.rows[-1].ended_s


@pytest.mark.parametrize(("max_staleness", "expected"), [(1, 0.80), (2, 1.15)])
def test_psrl(max_staleness: int, expected: float) -> None:
    runs = [ran("psrl", tail(seed, max_staleness)) for seed in SEEDS]
    assert mean(map(steps_per_min, runs)) == pytest.approx(expected, abs=0.05)
    assert max(row.staleness_max for run in runs for row in run.rows) == max_staleness


def test_areal() -> None:
    runs = [ran("areal", tail(seed)) for seed in SEEDS]
    assert [steps_per_min(run) for run in runs] == pytest.approx([2.957] * 3, abs=0.01)
    assert mean(max(row.staleness_max for row in run.rows) for run in runs) == pytest.approx(10, abs=1)


def test_roll() -> None:
    runs = [ran("roll-agentic", tail(seed)) for seed in SEEDS]
    thrown_away: list[float] = []
    for run in runs:
        pool = run.pool
        over = len(pool.started) - len(pool.running) - len(pool.finished)
        thrown_away.append(1 - sum(map(len, pool.steps)) / over)
    assert [steps_per_min(run) for run in runs] == pytest.approx([2.957] * 3, abs=0.01)
    assert mean(thrown_away) == pytest.approx(0.172, abs=0.01)
