# pyright: basic, reportMissingImports=false
"""Each function is right by hand, by finite differences and at its edges. ``test_objective`` tests the whole."""

import math
from collections.abc import Callable

import pytest
import torch

from staleflow.clients.models import likelihood
from staleflow.clients.models.likelihood import token_logprobs
from staleflow.clients.trainer.algorithms import advantages, corrections, losses, sequence_losses
from staleflow.clients.trainer.algorithms.aggregation import Aggregation, aggregation_of, scale, weights
from staleflow.clients.trainer.algorithms.choice import GROUP_ADVANTAGES
from staleflow.clients.trainer.algorithms.kl import kl_loss
from staleflow.clients.trainer.algorithms.mismatch import MismatchSums
from staleflow.clients.trainer.algorithms.objective import LOCAL
from staleflow.clients.trainer.algorithms.second_moment import largest_kept
from staleflow.configs.rules.algorithm import filter_of
from tests.clients.trainer.algorithms import literal
from tests.clients.trainer.making import config

CPU = torch.device("cpu")
ROW = torch.tensor([4, 4, 4, 0, 0, 2])
"""Three trajectories, as rows of a batch."""


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


GROUPED: list[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = [
    advantages.grpo,
    advantages.dr_grpo,
    advantages.rloo,
]


@pytest.mark.parametrize("function", GROUPED)
def test_a_group_of_one_and_a_group_of_equals_teach_nothing(
    function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    """The rule also holds where the sum of the rewards is no float32: 6 times 10.1 lies between two."""
    rewards = torch.tensor([5.0, *[0.25] * 3, *[10.1] * 6, *[-0.7] * 7, *[1e8 + 8] * 9])
    found = function(rewards, torch.tensor([0, *[1] * 3, *[2] * 6, *[3] * 7, *[4] * 9]))
    assert found.tolist() == [0.0] * len(rewards)
    assert found.dtype == torch.float32
    assert function(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).shape == (0,)


def test_group_advantages_by_hand() -> None:
    rewards, groups = torch.tensor([1.0, 0.0, 0.5, 0.0]), torch.tensor([8, 3, 8, 3])
    assert advantages.dr_grpo(rewards, groups).tolist() == [0.25, 0.0, -0.25, 0.0]
    assert advantages.rloo(rewards, groups).tolist() == [0.5, 0.0, -0.5, 0.0]
    assert advantages.grpo(rewards, groups).tolist() == pytest.approx([2**-0.5, 0, -(2**-0.5), 0], rel=1e-5)


def test_whitened_advantages_have_mean_zero_and_deviation_one() -> None:
    found = advantages.whitened(3 * drawn(50) + 7, LOCAL).double()
    assert float(found.mean()) == pytest.approx(0.0, abs=1e-6)
    assert float(found.std(correction=0)) == pytest.approx(1.0, abs=1e-5)
    assert advantages.whitened(torch.ones(4), LOCAL).tolist() == [0.0] * 4


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


def test_token_logprobs_pass_gradcheck() -> None:
    logits, ids = drawn(1, 3, 4).requires_grad_(), torch.tensor([[0, 1, 2]])
    assert torch.autograd.gradcheck(lambda z: token_logprobs(z, ids, 0.9), (logits,), eps=1e-2, atol=2e-3, rtol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_token_logprobs_in_parts_and_their_gradient_are_those_of_the_whole(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(likelihood, "MAX_PART_BYTES", 3 * 4 * 7)  # three of ten tokens
    logits, ids = drawn(2, 5, 7).to(dtype), torch.tensor([[0, 1, 2, 6, 5], [4, 4, 4, 0, 3]])
    pulls = drawn(2, 5)
    ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    found = token_logprobs(ours, ids, 0.7)
    scores = (theirs[:, :-1].float() / 0.7).log_softmax(-1)
    wanted = scores.gather(-1, ids[:, 1:, None]).squeeze(-1)
    assert torch.allclose(found[:, 1:], wanted, atol=1e-6)
    (slopes,) = torch.autograd.grad((found * pulls).sum(), ours)
    (literally,) = torch.autograd.grad((wanted * pulls[:, 1:]).sum(), theirs)
    assert slopes.dtype is dtype
    assert torch.allclose(slopes, literally, atol=1e-6 if dtype is torch.float32 else 1e-2)


def ppo(logprobs: torch.Tensor) -> torch.Tensor:
    return losses.ppo_clip(
        logprobs, drawn(6, seed=2), drawn(6, seed=3), clip_low=0.2, clip_high=0.3, dual_clip=1.5
    ).loss


def m2po(logprobs: torch.Tensor) -> torch.Tensor:
    return losses.m2po(logprobs, drawn(6, seed=2), drawn(6, seed=3), limit=1.0).loss


def opsm(logprobs: torch.Tensor) -> torch.Tensor:
    return sequence_losses.opsm(
        logprobs, drawn(6, seed=2), drawn(6, seed=3), ROW, clip_low=0.9, clip_high=3.0, opsm_delta=0.5
    ).loss


def k2(logprobs: torch.Tensor) -> torch.Tensor:
    return kl_loss("k2", logprobs, drawn(6, seed=2))


def k3(logprobs: torch.Tensor) -> torch.Tensor:
    return kl_loss("k3", logprobs, drawn(6, seed=2))


@pytest.mark.parametrize("function", [ppo, m2po, opsm, k2, k3])
def test_losses_whose_gradient_is_their_derivative_pass_gradcheck(
    function: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    logprobs = drawn(6, seed=5).requires_grad_()
    assert torch.autograd.gradcheck(function, (logprobs,))
    assert torch.autograd.grad(function(logprobs).sum(), logprobs)[0].abs().max() > 0


def test_k1_in_the_loss_has_the_gradient_of_the_divergence_and_not_its_own() -> None:
    logprobs, reference = drawn(6).requires_grad_(), drawn(6, seed=1)
    value = kl_loss("k1", logprobs, reference)
    (gradient,) = torch.autograd.grad(value.sum(), logprobs)
    assert torch.allclose(value, logprobs - reference)
    assert torch.allclose(gradient, logprobs - reference)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_the_estimators_agree_with_the_divergence_of_two_distributions(kind: str) -> None:
    """Value and gradient in expectation over the policy's own tokens; the gradient of k3 is right to first order
    only."""
    scores = torch.tensor([0.3, -0.2, 0.1], dtype=torch.float64, requires_grad=True)
    reference = torch.log_softmax(torch.tensor([0.25, -0.1, 0.0], dtype=torch.float64), 0)
    current = torch.log_softmax(scores, 0)
    exact = (current.exp() * (current - reference)).sum()
    (wanted,) = torch.autograd.grad(exact, scores, retain_graph=True)
    estimate = (current.detach().exp() * kl_loss(kind, current, reference)).sum()
    (found,) = torch.autograd.grad(estimate, scores)
    assert float(estimate.detach()) == pytest.approx(float(exact.detach()), rel=0.1)
    assert torch.allclose(found, wanted, atol=2e-3 if kind == "k3" else 1e-12)


def test_k3_pulls_the_farthest_tokens_back_with_a_bounded_force() -> None:
    """More than 10 nats under the reference, the gradient keeps its value at 10 nats and the value follows the
    tangent."""
    distance = torch.tensor([-1000.0, -21.0, -10.1, -10.0, -9.9, 0.0, 50.0], dtype=torch.float64, requires_grad=True)
    value = kl_loss("k3", distance, torch.zeros(7, dtype=torch.float64))
    (gradient,) = torch.autograd.grad(value.sum(), distance)
    slope = 1.0 - math.exp(10.0)
    assert gradient.tolist() == pytest.approx([slope] * 4 + [1.0 - math.exp(9.9), 0.0, 1.0])
    there = math.exp(10.0) - 1.0 - 10.0
    near = [there - 990.0 * slope, there - 11.0 * slope, there - 0.1 * slope, there, math.exp(9.9) - 1.0 - 9.9]
    assert value.tolist() == pytest.approx([*near, 0.0, 49.0])


def test_a_loss_of_another_name_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown estimator: k4; allowed: k1, k2, k3"):
        kl_loss("k4", torch.zeros(1), torch.zeros(1))


def test_ppo_clip_has_no_gradient_exactly_where_it_reports_a_clip() -> None:
    logprobs = drawn(60, seed=1).requires_grad_()
    found = losses.ppo_clip(logprobs, drawn(60, seed=2), drawn(60, seed=3), clip_low=0.2, clip_high=0.3, dual_clip=3.0)
    (gradient,) = torch.autograd.grad(found.loss.sum(), logprobs)
    assert torch.equal(gradient == 0, found.low | found.high)
    assert not (found.low & found.high).any()
    assert found.low.any()


def test_weights_are_constants() -> None:
    old, behavior = drawn(6).requires_grad_(), drawn(6, seed=1)
    made = [
        corrections.uncorrected(old, behavior),
        corrections.truncated(old, behavior, cap=1.5),
        corrections.decoupled(old, behavior),
        corrections.masked_tokens(old, behavior, low=0.5, high=2.0),
        corrections.masked_sequences(old, behavior, ROW, cap=2.0),
    ]
    assert not any(correction.weight.requires_grad for correction in made)
    assert float(made[1].weight.max()) == 1.5


def test_the_bounds_of_a_mask_are_inside() -> None:
    ratio = torch.tensor([0.5, 0.25, 2.0, 2.5], dtype=torch.float64)
    found = corrections.masked_tokens(ratio.log(), torch.zeros(4), low=0.5, high=2.0)
    assert found.weight.tolist() == pytest.approx([0.5, 0.0, 2.0, 0.0])


def test_the_weight_of_a_trajectory_is_the_product_over_its_tokens() -> None:
    ratios = torch.tensor([1.1, 0.9, 1.2, 3.0, 0.4, 2.5], dtype=torch.float64)
    found = corrections.masked_sequences(ratios.log(), torch.zeros(6), ROW, cap=2.0)
    assert found.weight.tolist() == pytest.approx([1.188] * 3 + [1.2] * 2 + [0.0])
    assert found.masked.tolist() == [False] * 5 + [True]


def test_one_broken_token_gives_a_large_number_and_not_infinity() -> None:
    old, behavior, row = torch.tensor([0.0, 0.0]), torch.tensor([-1000.0, 0.0]), torch.tensor([0, 1])
    assert corrections.truncated(old, behavior, cap=2.0).weight.tolist() == [2.0, 1.0]
    assert math.isfinite(float(corrections.decoupled(old, behavior).weight.max()))
    assert corrections.masked_sequences(old, behavior, row, cap=2.0).weight.tolist() == [0.0, 1.0]
    assert torch.isfinite(losses.ratio_of(old, behavior)).all()
    assert torch.isfinite(kl_loss("k3", behavior, old)).all()


@pytest.mark.parametrize("threshold", [1e-3, 0.04, 0.3, 1.0, 10.0])
def test_the_second_moment_is_cut_where_a_loop_from_the_largest_down_stops(threshold: float) -> None:
    squares = drawn(200, seed=1) ** 2
    tokens = [literal.Token(math.sqrt(s), 0.0, True) for s in squares.tolist()]
    limit = largest_kept(squares, threshold, LOCAL)
    expected = literal.m2_limit([literal.Written(0.0, 0, tokens)], {id(t): 1.0 for t in tokens}, threshold)
    assert (squares <= limit).sum() == sum(s <= expected + 1e-12 for s in squares.tolist())
    assert threshold > 3 or float(squares[squares <= limit].mean()) <= threshold


def test_m2po_leaves_out_what_runs_away_and_never_what_comes_back() -> None:
    distance, advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, 0.1]), torch.tensor([2.0, 2.0, -2.0, -2.0, 2.0])
    found = losses.m2po(distance, torch.zeros(5), advantages, limit=0.5)
    assert found.masked.tolist() == [True, False, False, True, False]
    assert (found.loss == 0).tolist() == found.masked.tolist()


def test_the_second_moment_of_nothing_and_of_a_broken_token() -> None:
    assert largest_kept(torch.zeros(0, dtype=torch.float64), 0.04, LOCAL) > 1e300
    kept = largest_kept(torch.tensor([0.0, 0.01, math.inf], dtype=torch.float64), 0.04, LOCAL)
    assert 0.01 <= kept < math.inf


def test_each_aggregation_gives_its_shares() -> None:
    def of(how: Aggregation) -> list[float]:
        return (weights(how, ROW, longest=8) * scale(how, tokens=10, sequences=4, trajectories=5)).tolist()

    assert of(Aggregation.TOKEN_MEAN) == pytest.approx([0.1] * 6)
    assert of(Aggregation.SEQUENCE_MEAN) == pytest.approx([1 / 12] * 3 + [1 / 8] * 2 + [1 / 4])
    assert of(Aggregation.CONSTANT) == pytest.approx([1 / 40] * 6)


def test_the_loss_chooses_the_aggregation_before_the_advantage_does() -> None:
    assert aggregation_of("grpo", "ppo_clip") is Aggregation.TOKEN_MEAN
    assert aggregation_of("dr_grpo", "ppo_clip") is Aggregation.CONSTANT
    assert aggregation_of("dr_grpo", "gspo") is Aggregation.SEQUENCE_MEAN
    assert aggregation_of("grpo", "opsm") is Aggregation.SEQUENCE_MEAN
    assert aggregation_of("dr_grpo", "mine.py:loss") is Aggregation.CONSTANT


def measured(old: torch.Tensor, behavior: torch.Tensor) -> dict[str, float]:
    sums = MismatchSums(CPU)
    never = torch.zeros(len(old), dtype=torch.bool)
    sums.add(old, behavior, torch.zeros(len(old), dtype=torch.int64), truncated=never, clipped=never)
    return sums.values(LOCAL)


def test_mismatch_kl_estimates_the_divergence_of_two_distributions() -> None:
    engine, trainer = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.4, 0.4, 0.2]).double()
    tokens = torch.multinomial(engine, 200_000, replacement=True, generator=torch.Generator().manual_seed(0))
    exact = float((engine * (engine / trainer).log()).sum())
    assert measured(trainer.log()[tokens], engine.log()[tokens])["mismatch_kl"] == pytest.approx(exact, rel=0.05)


def test_weights_of_nothing_are_one_and_a_broken_one_is_finite() -> None:
    nothing = {"mismatch_kl": 0, "is_weight/mean": 1, "is_weight/max": 1, "is_weight/ess": 1, "is_weight/truncated": 0}
    assert measured(torch.zeros(0), torch.zeros(0)) == nothing
    assert math.isfinite(measured(torch.tensor([0.0]), torch.tensor([-1000.0]))["is_weight/max"])


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "reinforce_pp"])
def test_what_is_filtered_by_default_has_no_advantage_and_what_is_kept_has_one(name: str) -> None:
    """Two groups: one all right, one all wrong."""
    rewards, group_ids = torch.tensor([1.0, 1.0, 0.0, 0.0]), torch.tensor([0, 0, 1, 1])
    if name in GROUP_ADVANTAGES:
        found = GROUP_ADVANTAGES[name](rewards, group_ids)
    else:
        found = advantages.whitened(rewards, LOCAL)
    filtered = filter_of(config(algorithm={"advantage": name})) == "zero_spread"
    assert found.eq(0).all() if filtered else found.ne(0).all()
