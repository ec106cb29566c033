# pyright: basic, reportMissingImports=false
"""The defaults hold where numeric noise and single outliers are all there is: decision 0037."""

import pytest
import torch

from staleflow.clients.trainer.algorithms import sequence_losses
from staleflow.clients.trainer.algorithms.choice import TrainedTokens, token_loss
from staleflow.clients.trainer.algorithms.kl import kl_loss
from tests.clients.trainer.algorithms.literal import algorithm

KL_COEF = 1e-3
TRAJECTORIES, LENGTH = 256, 512
ROW = torch.arange(TRAJECTORIES).repeat_interleave(LENGTH)
ADVANTAGES = torch.where(ROW % 2 == 0, 1.0, -1.0)
NOISE = {  # nats a token, and the deviation of a trajectory's mean
    "an engine in bfloat16": (0.01, 0.0),
    "an engine with coarser kernels": (0.03, 0.0),
    "staleness 2": (0.02, 2e-3),
}


def noisy(noise: float, drift: float) -> torch.Tensor:
    """Log-probabilities of a policy whose ratio to one of 0 everywhere has the mean 1 in every token without drift."""
    draw = torch.Generator().manual_seed(0)
    each = noise * torch.randn(len(ROW), generator=draw) - noise**2 / 2
    found: torch.Tensor = each + drift * torch.randn(TRAJECTORIES, generator=draw)[ROW]
    return found


def silenced(loss: torch.Tensor, logprobs: torch.Tensor) -> tuple[float, float]:
    """Shares of the good and the bad trajectories without a gradient."""
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    still = (gradient == 0).double()
    return float(still[ADVANTAGES > 0].mean()), float(still[ADVANTAGES < 0].mean())


def outweighs(kind: str) -> float:
    """Gradient of a token 10 nats below the reference and without an advantage, over that of the mean token of 4096."""
    draw = torch.Generator().manual_seed(0)
    reference, advantages = -torch.rand(4096, generator=draw), torch.randn(4096, generator=draw)
    start = reference + 0.05 * torch.randn(4096, generator=draw)
    start[0], advantages[0] = reference[0] - 10, 0.0
    logprobs = start.requires_grad_()
    loss = (-advantages * logprobs + KL_COEF * kl_loss(kind, logprobs, reference)).sum()
    (gradient,) = torch.autograd.grad(loss, logprobs)
    size = gradient.abs()
    return float(size[0] / size[1:].mean())


def test_one_outlier_does_not_outweigh_the_batch() -> None:
    assert outweighs("k3") > 20
    assert outweighs(algorithm().kl) < 0.1


@pytest.mark.parametrize("noise", NOISE.values(), ids=NOISE.keys())
@pytest.mark.parametrize("keys", [{}, {"ratio_to": "behavior", "gspo_low": 0.01, "gspo_high": 0.01}], ids=str)
def test_gspo_silences_no_trajectory_for_the_noise_of_its_engine(
    keys: dict[str, object], noise: tuple[float, float]
) -> None:
    """Neither with its defaults nor with the bounds that the configuration suggests for a ratio to the engine."""
    logprobs = noisy(*noise).requires_grad_()
    at = TrainedTokens(
        logprobs=logprobs, behavior=torch.zeros(len(ROW)), advantages=ADVANTAGES, row=ROW, age=torch.zeros_like(ROW)
    )
    found = token_loss(algorithm(loss="gspo", **keys))(at, 0.0)
    assert silenced(found.loss, logprobs) == (0.0, 0.0)
    assert not (found.low | found.high).any()


@pytest.mark.parametrize("noise", NOISE.values(), ids=NOISE.keys())
def test_the_bounds_of_the_gspo_paper_silence_a_third_of_bad_trajectories_against_a_noisy_engine(
    noise: tuple[float, float],
) -> None:
    how, logprobs = algorithm(), noisy(*noise).requires_grad_()
    found = sequence_losses.gspo(
        logprobs, torch.zeros(len(ROW)), ADVANTAGES, ROW, gspo_low=how.gspo_low, gspo_high=how.gspo_high
    )
    good, bad = silenced(found.loss, logprobs)
    assert good > 0.1
    assert bad > 0.3


def test_the_bounds_of_the_gspo_paper_clip_trajectories_that_moved_within_the_step() -> None:
    """Against the old policy, which has the trainer's numerics: no noise hides a move of 5e-4 nats a token."""
    moved = 5e-4 * ADVANTAGES * (ROW % 4 < 2)
    old = noisy(0.02, 2e-3)
    logprobs, how = (old + moved).requires_grad_(), algorithm()
    found = sequence_losses.gspo(logprobs, old, ADVANTAGES, ROW, gspo_low=how.gspo_low, gspo_high=how.gspo_high)
    assert silenced(found.loss, logprobs) == (0.5, 0.5)


def test_gspo_has_the_gradient_of_the_ratio_of_the_whole_trajectory_where_its_advantage_is_one() -> None:
    """The mean over the trajectory's tokens equals the derivative of ``-s * A``, s one exp of the mean log-ratio."""
    row, draw = torch.tensor([4, 4, 4, 0, 0, 2]), torch.Generator().manual_seed(1)
    old, start = (torch.randn(6, generator=draw, dtype=torch.float64) for _ in range(2))
    advantages = torch.tensor([1.5, 1.5, 1.5, -0.5, -0.5, 2.0], dtype=torch.float64)
    ours, theirs = start.clone().requires_grad_(), start.clone().requires_grad_()
    found = sequence_losses.gspo(ours, old, advantages, row, gspo_low=0.9, gspo_high=9.0)
    expected = torch.zeros((), dtype=torch.float64)
    mean = torch.zeros((), dtype=torch.float64)
    for each in (4, 0, 2):
        mine = row == each
        expected = expected - (theirs - old)[mine].mean().exp() * advantages[mine][0]
        mean = mean + found.loss[mine].mean()
    (gradient,) = torch.autograd.grad(mean, ours)
    (wanted,) = torch.autograd.grad(expected, theirs)
    assert float(mean.detach()) == pytest.approx(float(expected.detach()))
    assert torch.allclose(gradient, wanted)
    assert wanted.abs().max() > 0
