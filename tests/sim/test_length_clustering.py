"""Length-clustered composition with the shipped ranker speeds up runs in virtual time at no cost in correctness."""

from typing import Literal

import pytest

from staleflow.configs.schema import Config, Coordination, Prompts, Reward, Rollout, Staleness, Trajectories
from staleflow.configs.simulation import Simulated
from staleflow.configs.trainer import Trainer
from staleflow.sim.result import Result
from staleflow.sim.simulate import simulate

Composition = Literal["iid", "length_clustered"]


def run(composition: Composition, *, prompt_share: float, steps: int = 80, shards: int = 1) -> Result:
    """Simulate four engines, batches of 16 groups and a heavy tail; ``prompt_share`` of each length is predictable."""
    return simulate(
        Config(
            prompts=Prompts(source="nobody:opens"),
            reward=Reward(run="nobody:calls"),
            staleness=Staleness(max_staleness=1),
            rollout=Rollout(
                engine="simulated",
                group_size=1,
                workers=4,
                max_new_tokens=4096,
                filter="none",
                simulated=Simulated(mean_tokens=300, sigma=0.9, prompt_share=prompt_share, k1=0, k2=0.01),
            ),
            coordination=Coordination(
                routing="least_loaded",
                admission="fill",
                composition=composition,
                lookahead=10,
                ranker="learned" if composition != "iid" else "none",
            ),
            trainer=Trainer(backend="simulated", batch_size=16, steps=steps, simulated_step_s=3.0),
            trajectories=Trajectories(shards=shards),
        )
    )


def trained(result: Result) -> tuple[int, float]:
    """Number of violations, and mean trained length over mean drawn length to three digits."""
    return result.violations, round(result.length_bias, 3)


@pytest.mark.parametrize(("prompt_share", "factor"), [(1.0, 1.5), (0.7, 1.15)])
def test_steps_come_faster_when_prompts_of_like_length_share_them(prompt_share: float, factor: float) -> None:
    alone, clustered = (run(c, prompt_share=prompt_share) for c in ("iid", "length_clustered"))
    assert clustered.steps_per_min > factor * alone.steps_per_min
    assert trained(clustered) == trained(alone) == (0, 1.0)


def test_lengths_that_nothing_tells_make_a_clustered_run_no_slower() -> None:
    alone, clustered = (run(c, prompt_share=0.0, steps=160) for c in ("iid", "length_clustered"))
    assert clustered.steps_per_min > 0.9 * alone.steps_per_min
    assert trained(clustered) == (0, 1.0)


def test_a_clustered_run_with_a_learned_ranker_is_the_same_each_time_and_needs_no_certain_shard() -> None:
    first, again, sharded = (run("length_clustered", prompt_share=1.0, shards=shards) for shards in (1, 1, 3))
    assert first.trace_hash == again.trace_hash
    assert sharded.steps_per_min == pytest.approx(first.steps_per_min, rel=0.05)
