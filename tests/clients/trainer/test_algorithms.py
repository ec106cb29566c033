# pyright: basic, reportMissingImports=false
"""Each formula against a loop over tokens, and each gradient against finite differences."""

import math

import pytest
import torch

from staleflow.clients.trainer.algorithms.advantages import grpo
from staleflow.clients.trainer.algorithms.likelihood import token_logprobs
from staleflow.clients.trainer.algorithms.losses import ppo_clip, tis_weights, token_mean
from staleflow.clients.trainer.algorithms.mismatch import importance_weights, mismatch_kl


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def test_grpo_is_the_literal_formula_group_by_group() -> None:
    rewards = [1.0, 0.0, 0.5, 2.0, 2.0, -1.0, 3.0]
    groups = [7, 7, 7, 3, 3, 3, 9]
    expected = []
    for reward, group in zip(rewards, groups, strict=True):
        members = [r for r, g in zip(rewards, groups, strict=True) if g == group]
        mean = sum(members) / len(members)
        spread = math.sqrt(sum((r - mean) ** 2 for r in members) / max(1, len(members) - 1))
        expected.append((reward - mean) / (spread + 1e-6))
    assert grpo(torch.tensor(rewards), torch.tensor(groups)).tolist() == pytest.approx(expected, rel=1e-5)


def test_a_group_of_one_and_a_group_of_equals_teach_nothing() -> None:
    advantages = grpo(torch.tensor([5.0, 0.3, 0.3, 0.3]), torch.tensor([0, 1, 1, 1]))
    assert advantages.abs().max().item() < 1e-1 * 1e-6 / 1e-6 * 1e-1
    assert advantages[0].item() == 0.0


def test_grpo_of_nothing_is_nothing() -> None:
    assert grpo(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).shape == (0,)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_token_logprobs_are_those_of_the_sampling_distribution(temperature: float) -> None:
    logits, input_ids = drawn(2, 4, 5), torch.tensor([[0, 1, 2, 3], [4, 3, 2, 1]])
    found = token_logprobs(logits, input_ids, temperature)
    for row in range(2):
        assert found[row, 0] == 0.0
        for place in range(1, 4):
            scores = [float(z) / temperature for z in logits[row, place - 1]]
            total = math.log(sum(math.exp(z) for z in scores))
            assert float(found[row, place]) == pytest.approx(scores[input_ids[row, place]] - total, abs=1e-5)


def test_ppo_clip_is_the_literal_formula_token_by_token() -> None:
    logprobs, old, advantages = drawn(3, 6, seed=1), drawn(3, 6, seed=2), torch.tensor([1.5, -0.5, 0.0]).double()
    found = ppo_clip(logprobs, old, advantages, clip_low=0.2, clip_high=0.3)
    for row in range(3):
        for place in range(6):
            ratio = math.exp(logprobs[row, place] - old[row, place])
            advantage = float(advantages[row])
            cut = min(max(ratio, 0.8), 1.3)
            assert float(found.loss[row, place]) == pytest.approx(-min(ratio * advantage, cut * advantage))
            assert bool(found.low[row, place]) == (advantage < 0 and ratio < 0.8)
            assert bool(found.high[row, place]) == (advantage > 0 and ratio > 1.3)


def test_ppo_clip_has_no_gradient_exactly_where_it_reports_a_clip() -> None:
    logprobs = drawn(3, 6, seed=1).requires_grad_()
    advantages = torch.tensor([1.5, -0.5, 1.0]).double()
    found = ppo_clip(logprobs, drawn(3, 6, seed=2), advantages, clip_low=0.2, clip_high=0.3)
    found.loss.sum().backward()  # type: ignore[no-untyped-call]
    assert logprobs.grad is not None
    assert torch.equal(logprobs.grad == 0, found.low | found.high)
    assert (found.low | found.high).any()


def test_the_whole_loss_passes_gradcheck_away_from_the_clip() -> None:
    logprobs = (0.05 * drawn(2, 5, seed=3)).requires_grad_()
    old, behavior = torch.zeros(2, 5).double(), 0.5 * drawn(2, 5, seed=4)
    mask = drawn(2, 5, seed=5) > 0

    def loss(logprobs: torch.Tensor) -> torch.Tensor:
        clipped = ppo_clip(logprobs, old, torch.tensor([1.0, -2.0]).double(), clip_low=0.2, clip_high=0.2)
        return token_mean(clipped.loss * tis_weights(old, behavior, 2.0), mask, int(mask.sum()))

    assert torch.autograd.gradcheck(loss, (logprobs,))


def test_token_logprobs_pass_gradcheck() -> None:
    logits = drawn(1, 3, 4).requires_grad_()
    ids = torch.tensor([[0, 1, 2]])
    assert torch.autograd.gradcheck(lambda z: token_logprobs(z, ids, 0.9), (logits,), eps=1e-2, atol=2e-3, rtol=1e-2)


def test_with_old_detached_from_the_same_pass_the_gradient_is_the_weighted_policy_gradient() -> None:
    """One optimizer step a batch: the ratio is 1 everywhere, its gradient is that of the log-probability."""
    logprobs = drawn(2, 4, seed=6).requires_grad_()
    behavior, advantages = drawn(2, 4, seed=7), torch.tensor([0.7, -1.1]).double()
    found = ppo_clip(logprobs, logprobs.detach(), advantages, clip_low=0.2, clip_high=0.2)
    weights = tis_weights(logprobs.detach(), behavior, 2.0)
    (found.loss * weights).sum().backward()  # type: ignore[no-untyped-call]
    assert not (found.low | found.high).any()
    assert logprobs.grad is not None
    assert torch.allclose(logprobs.grad, -weights * advantages.unsqueeze(-1))


def test_tis_weights_are_capped_from_above_only_and_constant() -> None:
    old, behavior = drawn(2, 8, seed=8).requires_grad_(), drawn(2, 8, seed=9)
    weights = tis_weights(old, behavior, 1.5)
    expected = [
        min(math.exp(o - b), 1.5) for o, b in zip(old.flatten().tolist(), behavior.flatten().tolist(), strict=True)
    ]
    assert weights.flatten().tolist() == pytest.approx(expected)
    assert not weights.requires_grad
    assert float(weights.max()) == 1.5
    assert tis_weights(torch.tensor([0.0]), torch.tensor([-1000.0]), 2.0).tolist() == [2.0]


def test_a_cap_of_zero_switches_truncated_importance_sampling_off() -> None:
    assert tis_weights(drawn(2, 3), drawn(2, 3, seed=1), 0).tolist() == [[1.0] * 3] * 2


def test_micro_batches_add_up_to_the_token_mean_and_masked_nan_does_not_count() -> None:
    values, mask = drawn(4, 5), drawn(4, 5, seed=1) > 0
    whole = sum(float(v) for v, m in zip(values.flatten(), mask.flatten(), strict=True) if m) / int(mask.sum())
    values[~mask] = math.nan
    values.requires_grad_()
    parts = [token_mean(values[rows], mask[rows], int(mask.sum())) for rows in ([0], [1, 2], [3])]
    total = torch.stack(parts).sum()
    total.backward()  # type: ignore[no-untyped-call]
    assert float(total.detach()) == pytest.approx(whole)
    assert values.grad is not None
    assert torch.isfinite(values.grad).all()


def test_token_mean_of_no_tokens_is_zero() -> None:
    assert float(token_mean(torch.ones(2, 2), torch.zeros(2, 2, dtype=torch.bool), 0)) == 0.0


def test_mismatch_kl_is_k3_and_never_negative() -> None:
    old, behavior = drawn(50, seed=1), drawn(50, seed=2)
    terms = [math.exp(o - b) - 1 - (o - b) for o, b in zip(old.tolist(), behavior.tolist(), strict=True)]
    assert mismatch_kl(old, behavior) == pytest.approx(sum(terms) / 50)
    assert min(terms) >= 0
    assert mismatch_kl(old, old) == 0.0
    assert mismatch_kl(old[:0], old[:0]) == 0.0


def test_k3_estimates_the_divergence_of_two_distributions() -> None:
    engine, trainer = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.4, 0.4, 0.2]).double()
    tokens = torch.multinomial(engine, 200_000, replacement=True, generator=torch.Generator().manual_seed(0))
    exact = float((engine * (engine / trainer).log()).sum())
    assert mismatch_kl(trainer.log()[tokens], engine.log()[tokens]) == pytest.approx(exact, rel=0.05)


def test_importance_weights_are_of_the_untruncated_ratio() -> None:
    old, behavior = drawn(40, seed=1), drawn(40, seed=2)
    weights = [math.exp(o - b) for o, b in zip(old.tolist(), behavior.tolist(), strict=True)]
    found = importance_weights(old, behavior, 2.0)
    assert found.mean == pytest.approx(sum(weights) / 40)
    assert found.max == pytest.approx(max(weights))
    assert found.ess == pytest.approx(sum(weights) ** 2 / (40 * sum(w * w for w in weights)))
    assert found.truncated == pytest.approx(sum(w > 2.0 for w in weights) / 40)


def test_one_broken_token_gives_a_large_number_and_not_infinity() -> None:
    found = importance_weights(torch.tensor([0.0, 0.0]), torch.tensor([-1000.0, 0.0]), 0)
    assert math.isfinite(found.max)
    assert found.truncated == 0.0
    assert importance_weights(torch.zeros(0), torch.zeros(0), 2.0).ess == 1.0
