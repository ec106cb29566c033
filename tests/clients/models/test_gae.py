# pyright: basic, reportMissingImports=false
"""GAE over the trained tokens of a trajectory, beside the recursions of verl and TRL."""

import random
from collections.abc import Sequence

import pytest
import torch

from staleflow.clients.models.gae import gae, returns_to_go, token_rewards, trained_lengths
from staleflow.clients.trainer.algorithms.advantages import whitened
from staleflow.clients.trainer.algorithms.objective import LOCAL

Trajectory = tuple[float, list[float], list[float], list[bool]]
"""Reward, and of each completion token the cost, the critic's value, and true if the model sampled it."""


def drawn(seed: int, *, environment: float = 0.5) -> list[Trajectory]:
    """Trajectories of 0 to 12 tokens, of which ``environment`` are the environment's, with the last one among them."""
    draw = random.Random(seed)
    found: list[Trajectory] = []
    for _ in range(8):
        size = draw.randint(0, 12)
        costs, values = ([draw.gauss(0, 1) for _ in range(size)] for _ in range(2))
        found.append((draw.random(), costs, values, [draw.random() >= environment for _ in range(size)]))
    return found


def ours(batch: Sequence[Trajectory], gamma: float, gae_lambda: float) -> list[float]:
    """Advantages of the trained tokens, as the objective computes them."""
    mask = torch.tensor([trained for one in batch for trained in one[3]], dtype=torch.bool)
    steps = trained_lengths(mask, torch.tensor([len(one[3]) for one in batch]))
    costs = torch.tensor([cost for one in batch for cost in one[1]])[mask]
    values = torch.tensor([value for one in batch for value in one[2]])[mask]
    earned = token_rewards(torch.tensor([one[0] for one in batch]), steps, costs)
    return gae(earned, values, steps, gamma=gamma, gae_lambda=gae_lambda).tolist()


def of_verl(batch: Sequence[Trajectory], gamma: float, gae_lambda: float) -> list[float]:
    """The recursion of verl, over all tokens: a masked token leaves the next value and the last advantage as they were.

    Source: ``compute_gae_advantage_return`` in ``verl/trainer/ppo/core_algos.py``. verl adds the reward to the last
    token of the response. If that is a token of the environment, the reward is lost. Here the last trained token has
    it.
    """
    found: list[float] = []
    for reward, costs, values, mask in batch:
        last = max((place for place, trained in enumerate(mask) if trained), default=-1)
        next_value = next_advantage = 0.0
        backwards: list[float] = []
        for place in reversed(range(len(mask))):
            earned = (reward if place == last else 0.0) - costs[place]
            advantage = earned + gamma * next_value - values[place] + gamma * gae_lambda * next_advantage
            if mask[place]:
                next_value, next_advantage = values[place], advantage
                backwards.append(advantage)
        found += reversed(backwards)
    return found


def of_trl(batch: Sequence[Trajectory], gamma: float, gae_lambda: float) -> list[float]:
    """The recursion of TRL, which knows completions without an environment only: every token is a step.

    Source: ``PPOTrainer.train`` in ``trl/trainer/ppo_trainer.py`` of TRL 0.20 (TRL 1.16 has no PPO).
    """
    found: list[float] = []
    for reward, costs, values, mask in batch:
        assert all(mask)
        rewards = [-cost for cost in costs]
        if rewards:
            rewards[-1] += reward
        advantage, backwards = 0.0, list[float]()
        for place in reversed(range(len(rewards))):
            after = values[place + 1] if place + 1 < len(rewards) else 0.0
            advantage = rewards[place] + gamma * after - values[place] + gamma * gae_lambda * advantage
            backwards.append(advantage)
        found += reversed(backwards)
    return found


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(("gamma", "gae_lambda"), [(1.0, 1.0), (1.0, 0.95), (0.9, 0.0), (0.97, 0.7)])
def test_tokens_of_the_environment_are_no_steps_as_in_verl(seed: int, gamma: float, gae_lambda: float) -> None:
    batch = drawn(seed)
    assert ours(batch, gamma, gae_lambda) == pytest.approx(of_verl(batch, gamma, gae_lambda), abs=1e-5)


@pytest.mark.parametrize("seed", range(5))
def test_a_completion_without_an_environment_has_the_advantages_of_trl(seed: int) -> None:
    batch = drawn(seed, environment=0.0)
    assert ours(batch, 0.97, 0.9) == pytest.approx(of_trl(batch, 0.97, 0.9), abs=1e-5)


def test_500_tokens_of_a_tool_do_not_hide_the_reward_from_the_first_turn() -> None:
    """Two turns of 20 tokens: the last token of the first one is 20 steps from the last of the second, not 520."""
    turn, tool = [True] * 20, [False] * 500
    mask = [*turn, *tool, *turn]
    batch: list[Trajectory] = [(1.0, [0.0] * 540, [0.5] * 540, mask)]
    found = ours(batch, 1.0, 0.95)
    assert found[19] == pytest.approx(0.5 * 0.95**20)
    assert found == pytest.approx([0.5 * 0.95**steps for steps in reversed(range(40))])


def test_whitening_is_that_of_verl_and_trl_but_for_their_sample_variance() -> None:
    """Both: (A - mean) / sqrt(variance + 1e-8), over the unmasked tokens, with T - 1 in the variance."""
    given = torch.randn(200, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    theirs = (given - given.mean()) / (given.var(correction=1) + 1e-8).sqrt()
    assert torch.allclose(whitened(given, LOCAL).double(), theirs * (200 / 199) ** 0.5, atol=1e-5)


def test_the_reward_is_earned_by_the_last_trained_token() -> None:
    mask = torch.tensor([True, True, False, False, True, False])
    steps = trained_lengths(mask, torch.tensor([3, 1, 2]))
    assert steps.tolist() == [2, 0, 1]
    earned = token_rewards(torch.tensor([1.0, 9.0, 2.0]), steps, torch.tensor([0.1, 0.2, 0.3]))
    assert earned.tolist() == pytest.approx([-0.1, 0.8, 1.7])
    assert returns_to_go(earned, steps).tolist() == pytest.approx([0.7, 0.8, 1.7])


def test_gae_by_hand() -> None:
    lengths = torch.tensor([2, 0, 1])
    rewards = token_rewards(torch.tensor([1.0, 9.0, 2.0]), lengths)
    assert rewards.tolist() == [0.0, 1.0, 2.0]
    values = torch.tensor([0.5, 0.25, 1.0])
    last = 1.0 - 0.25
    first = (0.0 + 0.5 * 0.25 - 0.5) + 0.5 * 0.8 * last
    assert gae(rewards, values, lengths, gamma=0.5, gae_lambda=0.8).tolist() == pytest.approx([first, last, 1.0])


def test_gae_with_lambda_one_is_the_return_minus_the_value_and_with_zero_the_one_step_error() -> None:
    lengths, random = torch.tensor([3, 2]), torch.Generator().manual_seed(0)
    rewards, values = torch.randn(2, 5, generator=random)
    full = gae(rewards, values, lengths, gamma=1.0, gae_lambda=1.0)
    assert torch.allclose(full, returns_to_go(rewards, lengths) - values, atol=1e-6)
    after = torch.tensor([values[1], values[2], 0.0, values[4], 0.0])
    assert torch.allclose(gae(rewards, values, lengths, gamma=1.0, gae_lambda=0.0), rewards + after - values, atol=1e-6)
    assert gae(rewards[:0], values[:0], lengths[:0], gamma=1.0, gae_lambda=1.0).shape == (0,)
