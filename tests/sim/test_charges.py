"""A run takes the time that its cost file has for each part of it."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from staleflow.configs.costs import Costs, EngineCosts, RewardCosts
from staleflow.configs.errors import ConfigError
from staleflow.configs.loading.cost_file import read_costs
from staleflow.configs.schema import Config
from staleflow.sim.charges import Charges
from staleflow.sim.cost import StepCost
from staleflow.sim.peers.run import simulate_peer
from staleflow.sim.result import Result
from staleflow.sim.simulate import simulate
from staleflow.trace.reader import read_events
from tests.sim.configs import config

ZERO = "[scheduler]\n[shard]\n[wire]\n[publish]\n[pull]\n[load]\n[reward]\n[checkpoint]\n"
ENGINES: dict[str, Any] = {"lengths": {"lengths": "uniform", "min_tokens": 10, "max_tokens": 10}}
"""Every trajectory has 10 tokens of 10 ms."""

With = Callable[..., Config]


@pytest.fixture
def costing(tmp_path: Path) -> With:
    """Return a configuration with a cost file."""

    def configured(costs: str, *, train: dict[str, Any] | None = None, **settings: Any) -> Config:
        file = tmp_path / "costs.toml"
        file.write_text(costs)
        given: dict[str, Any] = {**ENGINES, **settings}
        config_ = config(costs=str(file), **given)
        return replace(config_, trainer=replace(config_.trainer, **(train or {})))

    return configured


def unchained(event: dict[str, Any]) -> dict[str, Any]:
    """Return an event without the digests of the configuration and of the line before it."""
    return {key: value for key, value in event.items() if key not in ("config_sha", "h")}


def ends(result: Result) -> list[float]:
    assert result.violations == 0
    return [row.ended_s for row in result.steps]


def test_zero_costs_leave_the_timeline_as_it_is(costing: With, tmp_path: Path) -> None:
    plain, charged = tmp_path / "plain", tmp_path / "charged"
    settings: dict[str, Any] = {"engines": 4, "lengths": {}, "lease_s": 2.0, "batch_size": 8}
    simulate(config(**settings), run_dir=plain)
    simulate(costing(ZERO, **settings), run_dir=charged)
    first, second = (list(read_events(folder / "trace.jsonl")) for folder in (plain, charged))
    assert len(first) > 300
    assert [unchained(event) for event in first] == [unchained(event) for event in second]


def test_a_step_takes_its_tokens(costing: With) -> None:
    costs = "[trainer]\nfixed_s = 1.0\ntoken_s = 0.01\ntrajectory_s = 0.1\n"
    # Batches of 4 groups of 2 trajectories of 10 + 5 tokens: 1.0 + 0.01 * 120 + 0.1 * 8 s.
    result = simulate(costing(costs, prompt_tokens=5), steps=6)
    assert [row.ended_s - row.began_s for row in result.steps] == [pytest.approx(3.0)] * 6
    assert result.trainer_limit == pytest.approx(20.0)


def test_a_streaming_trainer_takes_its_tokens(costing: With) -> None:
    costs = "[trainer]\nfixed_s = 1.0\ntoken_s = 0.01\n"
    result = simulate(costing(costs, train={"streaming": True, "stream_groups": 2}), steps=6)
    assert [row.ended_s - row.began_s for row in result.steps][2:5] == [pytest.approx(1.8)] * 3


@pytest.mark.parametrize("overlap", [True, False])
def test_a_trainer_stands_still_between_two_steps(costing: With, overlap: bool) -> None:
    costs = "[trainer]\nfixed_s = 2.0\nbetween_s = 0.5\n[publish]\nfixed_s = 0.25\n"
    result = simulate(costing(costs, train={"overlap_publish": overlap}), steps=6)
    step_s = 2.5 if overlap else 2.75
    assert [b - a for a, b in pairwise(ends(result))] == [pytest.approx(step_s)] * 5
    assert result.trainer_limit == pytest.approx(60.0 / step_s)


@pytest.mark.parametrize(("workers", "seconds"), [(1, 6.0), (2, 3.0), (6, 1.0)])
def test_reward_workers_score_one_group_after_another(costing: With, workers: int, seconds: float) -> None:
    settings: dict[str, Any] = {"engines": 6, "slots": 2, "batch_size": 6, "max_staleness": 0, "train_s": 1.0}
    given = costing("[reward]\ngroup_s = 1.0\nfixed_s = 0.25\n", **settings)
    times = ends(simulate(replace(given, reward=replace(given.reward, workers=workers)), steps=3))
    # 10 tokens of 10 ms at the same time for all six groups, their rewards, 1 s of training.
    assert [b - a for a, b in pairwise(times)] == [pytest.approx(0.1 + seconds + 0.25 + 1.0)] * 2
    peer = simulate_peer("verl", replace(given, reward=replace(given.reward, workers=workers)), steps=2)
    assert peer.steps[0].began_s == pytest.approx(0.1 + seconds + 0.25)


PUBLISH = "[publish]\nfixed_s = 0.25\ngib_s = 0.5\n"


def test_without_overlap_a_step_waits_until_its_version_is_published(costing: With) -> None:
    given = costing(PUBLISH, model_gib=0.5, train={"overlap_publish": False})
    times = ends(simulate(given, steps=6))
    # A batch is always ready after the first: 2 s of training, 0.5 s of publishing.
    assert [b - a for a, b in pairwise(times)] == [pytest.approx(2.5)] * 5


def test_with_overlap_the_next_step_trains_while_a_version_is_published(costing: With) -> None:
    times = ends(simulate(costing(PUBLISH, model_gib=0.5), steps=6))
    assert [b - a for a, b in pairwise(times)] == [pytest.approx(2.0)] * 5
    first = simulate(costing(PUBLISH, model_gib=0.5), steps=1)
    assert ends(first)[0] - first.steps[0].began_s == pytest.approx(2.5)


def test_a_step_waits_for_the_version_before_it_where_publishing_is_slower(costing: With) -> None:
    times = ends(simulate(costing("[publish]\nfixed_s = 3.0\n"), steps=6))
    assert [b - a for a, b in pairwise(times)] == [pytest.approx(3.0)] * 5


@pytest.mark.parametrize(("asynchronous", "seconds"), [("false", 1.5), ("true", 0.0)])
@pytest.mark.parametrize("overlap", [True, False])
def test_training_stands_still_for_a_checkpoint(
    costing: With, asynchronous: str, seconds: float, overlap: bool
) -> None:
    costs = f"[checkpoint]\nfixed_s = 0.5\ngib_s = 1.0\nasynchronous = {asynchronous}\n[publish]\nfixed_s = 0.25\n"
    given = costing(costs, model_gib=1.0, train={"overlap_publish": overlap, "checkpoint_every": 2})
    times = ends(simulate(given, steps=5))
    step_s = 2.0 if overlap else 2.25
    gaps = [b - a for a, b in pairwise(times)]
    assert gaps == [pytest.approx(step_s), pytest.approx(step_s + seconds)] * 2


def test_weights_take_their_bytes_to_engines(costing: With) -> None:
    costs = "[pull]\nfixed_s = 0.1\ngib_s = 0.2\nnetwork_gib_s = 1.0\n[load]\nfixed_s = 0.01\ngib_s = 0.05\n"
    charges = Charges.of(costing(costs, model_gib=2.0))
    assert charges.pull_s() == pytest.approx(0.5)
    assert charges.pull_s(remote=True) == pytest.approx(2.5)
    assert charges.load_s() == pytest.approx(0.11)
    result = simulate(costing(costs, model_gib=2.0), steps=3)
    began_s, ended_s, version = result.engines[0].loads[0]
    assert [began_s, ended_s] == pytest.approx([0.5, 0.61])
    assert version == 0


def test_without_its_table_a_part_has_the_constant_of_the_configuration(costing: With) -> None:
    charges = Charges.of(costing("", pull_s=0.3, load_s=0.2, reward_s=0.1, prefill_s=0.01))
    assert (charges.pull_s(remote=True), charges.load_s(), charges.reward_s(1, 2)) == (0.3, 0.2, 0.1)
    assert (charges.train_s(4, 1000), charges.publish_s(), charges.written_s()) == (2.0, 0.0, 0.0)
    assert charges.step_cost() == StepCost(k1=0.0, k2=0.01, k3=0.0, k4=0.0, prefill_s=0.01)


def test_the_scheduler_and_the_shard_delay_a_group(costing: With) -> None:
    # One engine, one group in a batch, one group at a time. Scheduler and shard take 0.1 s and 0.2 s for each message.
    settings: dict[str, Any] = {"engines": 1, "slots": 2, "batch_size": 1, "max_staleness": 0, "train_s": 1.0}
    plain = ends(simulate(costing("", **settings), steps=4))
    shard = ends(simulate(costing("[shard]\npush_group_s = 0.2\nfetch_group_s = 0.3\n", **settings), steps=4))
    assert plain[2] - plain[1] == pytest.approx(1.1)
    assert shard[2] - shard[1] == pytest.approx(1.6)
    result = simulate(costing("[scheduler]\nmessage_s = 0.01\n", **settings), steps=4)
    times = ends(result)
    assert times[2] - times[1] > plain[2] - plain[1] + 0.04  # load, assignment, push, occupy, batch, publish
    assert 0.0 < result.scheduler_busy < 0.2


def test_a_reward_takes_its_distribution() -> None:
    charges = Charges(config(), Costs(reward=RewardCosts(fixed_s=1.0, mean_s=2.0)))
    drawn = [charges.reward_s(group, 1) for group in range(4000)]
    assert sum(drawn) / len(drawn) == pytest.approx(3.0, rel=0.05)
    assert min(drawn) > 1.0
    assert drawn == [charges.reward_s(group, 1) for group in range(4000)]
    spread = Charges(config(), Costs(reward=RewardCosts(mean_s=2.0, distribution="lognormal", sigma=0.5)))
    assert sum(spread.reward_s(group, 1) for group in range(4000)) / 4000 == pytest.approx(2.0, rel=0.05)


def test_experts_are_read_as_they_are_chosen() -> None:
    cost = StepCost.of(EngineCosts(k2=1.0, k4=0.5, experts=8, active=2, experts_s=4.0))
    assert cost.steps_s(1, 1, 0) == pytest.approx(1.0 + 4.0 * 0.25 + 0.5)
    assert cost.steps_s(1, 2, 0) == pytest.approx(1.0 + 4.0 * (1 - 0.75**2) + 0.5)
    assert cost.steps_s(1, 1000, 0) == pytest.approx(5.5)
    for running in (1, 2, 64):
        assert cost.steps_until(cost.steps_s(17, running, 5), running, 5) == 17


def test_peers_are_charged_for_the_same_parts(costing: With) -> None:
    costs = "[trainer]\nfixed_s = 1.0\ntoken_s = 0.01\n[publish]\nfixed_s = 0.5\n[reward]\nfixed_s = 0.25\n"
    result = simulate_peer("verl", costing(costs), steps=3)
    assert [row.ended_s - row.began_s for row in result.steps] == [pytest.approx(2.3)] * 3
    assert result.steps[0].began_s == pytest.approx(0.35)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("[scheduler]\nmesage_s = 1", "unknown field `mesage_s`"),
        ("[wire]\nlatency_s = -1", "`float` >= 0"),
        ("[wire", "it must be TOML"),
        ("[engine]\nexperts = 8\nactive = 9", "engine.active is 9; engine.active must be from 1 to the 8"),
    ],
)
def test_a_wrong_cost_file_is_rejected_by_name(costing: With, text: str, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        simulate(costing(text))


def test_a_missing_cost_file_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="it cannot be read: No such file"):
        read_costs(tmp_path / "none.toml")
