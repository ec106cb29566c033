# pyright: basic, reportMissingImports=false
"""Options of the objective by hand, at their edges, and in steps of a real model; ``test_objective`` has the loops."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from staleflow.clients.models import likelihood
from staleflow.clients.models.likelihood import target_logprobs_and_entropy, token_logprobs
from staleflow.clients.trainer.algorithms import advantages
from staleflow.clients.trainer.algorithms.aggregation import Aggregation, aggregation_of
from staleflow.clients.trainer.algorithms.distillation import teacher_advantage
from staleflow.clients.trainer.algorithms.dppo import dppo
from staleflow.clients.trainer.algorithms.ess import TrajectoryWeights, lr_factor
from staleflow.clients.trainer.algorithms.geometric import gmpo, masked_geometric
from staleflow.clients.trainer.algorithms.objective import LOCAL, Objective, tokens_of
from staleflow.clients.trainer.data.batch import TrainBatch
from staleflow.clients.trainer.torch_trainer import TorchTrainer
from staleflow.configs.errors import ConfigError
from staleflow.protocols.consistency.ids import Step
from tests.clients.trainer.algorithms import literal
from tests.clients.trainer.algorithms.literal import algorithm
from tests.clients.trainer.algorithms.test_objective import LONGEST, SETTINGS, columns, drawn, settings, stepped, whole
from tests.clients.trainer.making import batch, config

CPU = torch.device("cpu")
ROW = torch.tensor([4, 4, 4, 0, 0, 2])


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def going_on() -> bool:
    return False


@pytest.mark.parametrize(
    ("setting", "metric"),
    [
        ("masked geometric", "masked/sequence"),
        ("masked geometric", "is_weight/truncated"),
        ("gmpo", "clip/low"),
        ("gmpo", "clip/high"),
        ("dppo", "clip/low"),
        ("dppo", "clip/high"),
        ("dppo, kl", "clip/low"),
        ("dppo, kl", "clip/high"),
        ("veto", "masked/sequence"),
        ("veto, gspo", "masked/sequence"),
        ("veto, gae", "masked/sequence"),
    ],
)
def test_the_drawn_data_reaches_every_bound(setting: str, metric: str) -> None:
    values = [literal.step(algorithm(**SETTINGS[setting]), drawn(seed), LONGEST).metrics[metric] for seed in range(3)]
    assert 0 < sum(values) < len(values)


def test_an_explicit_aggregation_overrides_those_of_loss_and_advantage() -> None:
    assert aggregation_of("grpo", "gmpo") is Aggregation.SEQUENCE_MEAN
    assert aggregation_of("grpo", "dppo") is Aggregation.TOKEN_MEAN
    assert aggregation_of("dr_grpo", "gspo", "token_mean") is Aggregation.TOKEN_MEAN
    assert aggregation_of("dr_grpo", "ppo_clip", "sequence_mean") is Aggregation.SEQUENCE_MEAN
    assert aggregation_of("grpo", "gspo", "sequence_sum") is Aggregation.CONSTANT


def test_gradients_of_gmpo_and_dppo_are_their_derivatives() -> None:
    logprobs, behavior = (-1 - random(6).abs()).requires_grad_(), -1 - random(6, seed=1).abs()
    gains = torch.tensor([0.5, 0.5, 0.5, -2.0, -2.0, 1.0], dtype=torch.float64)
    kinds = [lambda z: gmpo(z, behavior, gains, ROW, gmpo_low=0.4, gmpo_high=0.4).loss]
    kinds += [lambda z: dppo(z, behavior, gains, divergence="tv", dppo_low=0.1, dppo_high=0.1).loss]
    for loss in kinds:
        assert torch.autograd.gradcheck(loss, (logprobs,))


def test_dppo_bounds_moved_probability_where_ppo_bounds_ratios() -> None:
    """A rare token may become ten times likelier; a frequent one may not lose a fifth of all probability."""
    logprobs, behavior = torch.tensor([0.001, 0.7]).log(), torch.tensor([0.0001, 0.9]).log()
    gains = torch.tensor([1.0, -1.0])
    for divergence, bound in (("tv", 0.15), ("kl", 0.05)):
        found = dppo(logprobs, behavior, gains, divergence=divergence, dppo_low=bound, dppo_high=bound)
        assert (found.high.tolist(), found.low.tolist()) == ([False, False], [False, True])
        back = dppo(logprobs, behavior, -gains, divergence=divergence, dppo_low=bound, dppo_high=bound)
        assert not (back.low | back.high).any()  # updates towards the engine are never masked


def test_dppo_is_finite_where_a_model_is_certain() -> None:
    logprobs, behavior = torch.tensor([0.0, -50.0, 0.0]), torch.tensor([-50.0, 0.0, 0.0])
    found = dppo(logprobs, behavior, torch.ones(3), divergence="kl", dppo_low=0.05, dppo_high=0.05)
    assert found.high.tolist() == [True, False, False]
    assert found.loss.isfinite().all()


def test_the_geometric_mask_ignores_length_and_bounds_are_inside() -> None:
    """Twice as many tokens with the same ratios: the product is squared, the geometric mean stays."""
    ratio = torch.tensor([1.5, 0.9, 1.2])
    for copies in (1, 2, 50):
        old = ratio.log().repeat(copies).double()
        row = torch.zeros(len(old), dtype=torch.int64)
        mean = float(old.mean().exp())
        for low, high, masked in ((mean - 1e-9, mean + 1e-9, False), (0.1, mean - 1e-6, True), (mean + 1e-6, 9, True)):
            found = masked_geometric(old, torch.zeros_like(old), row, low=low, high=high, cap=1.3)
            assert found.masked.tolist() == [masked] * len(old)
            wanted = [0.0] * 3 if masked else [1.3, 0.9, 1.2]
            assert found.weight.tolist() == pytest.approx(wanted * copies)
            assert found.truncated.tolist() == [not masked, False, False] * copies


def test_the_baseline_of_reinforce_pp_is_whitened_over_the_tokens_of_the_batch() -> None:
    """Against the published order of operations: reward minus group mean, repeated, then whitened."""
    written = drawn(3)
    how = algorithm(advantage="reinforce_pp_baseline", loss="aipo", aipo_cap=1e6)
    rewards, groups = torch.tensor([one.reward for one in written]), torch.tensor([one.group for one in written])
    centred = advantages.dr_grpo(rewards, groups)
    tokens = torch.cat([each.repeat(len(one.trained)) for each, one in zip(centred, written, strict=True)]).double()
    white = (tokens - tokens.mean()) / (tokens.std(correction=0) + 1e-6)
    _, gradients, _ = stepped(how, written, whole(written))
    trained = [token for one in written for token in one.trained]
    for token, each in zip(trained, white.tolist(), strict=True):
        wanted = -math.exp(token.logprob - token.behavior) * each / len(trained)
        assert gradients[id(token)] == pytest.approx(wanted, rel=1e-4, abs=1e-6)


def scored(logits: torch.Tensor, ids: torch.Tensor, temperature: float) -> torch.Tensor:
    """Log-probability and entropy of each token but the first, [N, L - 1, 2]."""
    found = target_logprobs_and_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), temperature)
    return found.view(len(ids), -1, 2)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_entropies_are_those_of_the_sampling_distribution(temperature: float) -> None:
    logits, ids = random(2, 4, 5), torch.tensor([[0, 1, 2, 3], [4, 3, 2, 1]])
    found = scored(logits, ids, temperature)
    assert torch.allclose(found[..., 0], token_logprobs(logits, ids, temperature)[:, 1:])
    for row in range(2):
        for place in range(1, 4):
            weights = [math.exp(float(z) / temperature) for z in logits[row, place - 1]]
            chances = [weight / sum(weights) for weight in weights]
            assert float(found[row, place - 1, 1]) == pytest.approx(-sum(p * math.log(p) for p in chances), abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_of_the_entropy_in_parts_is_that_of_autograd(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(likelihood, "MAX_PART_BYTES", 3 * 4 * 7)  # three of ten tokens
    logits, ids = random(2, 5, 7).to(dtype), torch.tensor([[0, 1, 2, 6, 5], [4, 4, 4, 0, 3]])
    pulls = random(2, 4, 2, seed=1).float()
    ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    found = scored(ours, ids, 0.7)
    scores = (theirs[:, :-1].float() / 0.7).log_softmax(-1)
    entropy = -(scores.exp() * scores).sum(-1)
    wanted = torch.stack([scores.gather(-1, ids[:, 1:, None]).squeeze(-1), entropy], -1)
    assert torch.allclose(found, wanted, atol=1e-5)
    (slopes,) = torch.autograd.grad((found * pulls).sum(), ours)
    (literally,) = torch.autograd.grad((wanted * pulls).sum(), theirs)
    assert slopes.dtype is dtype
    assert torch.allclose(slopes, literally, atol=1e-5 if dtype is torch.float32 else 2e-2)


def test_an_impossible_token_has_no_share_in_the_entropy() -> None:
    logits = torch.tensor([[[0.0, 0.0, -math.inf], [0.0, 0.0, 0.0]]], requires_grad=True)
    found = scored(logits, torch.tensor([[0, 1]]), 1.0)
    (slopes,) = torch.autograd.grad(found[0, 0].sum(), logits)
    assert found[0, 0].tolist() == pytest.approx([-math.log(2), math.log(2)])
    assert slopes.isfinite().all()


@pytest.mark.parametrize("packing", [False, True])
def test_the_entropy_bonus_of_a_model_is_that_of_a_literal_loop(model_directory: Path, packing: bool) -> None:
    keys = {"micro_tokens": 40, "grad_clip": 1e9, "packing": packing}
    without = gradients(TorchTrainer(config(**keys), model_directory))
    trainer = TorchTrainer(config(**keys, algorithm={"entropy_coef": 0.5}), model_directory)
    found = gradients(trainer)
    data, model = batch(0), TorchTrainer(config(), model_directory).model
    total, tokens = torch.zeros(()), 0
    for row in range(len(data.rewards)):
        length = int(data.sequence_lengths[row])
        ids = torch.from_numpy(data.input_ids[row, :length])
        scores = model(input_ids=ids.unsqueeze(0)).logits[0].log_softmax(-1)
        for place in range(3, length):
            total = total - (scores[place - 1].exp() * scores[place - 1]).sum()
            tokens += 1
    (-0.5 * total / tokens).backward()  # type: ignore[no-untyped-call]
    for name, parameter in model.named_parameters():
        assert torch.allclose(found[name] - without[name], parameter.grad, rtol=1e-3, atol=1e-6), name
    values = trainer.train(batch(0), Step(0), going_on).values
    assert values["entropy"] != pytest.approx(float(-data.behavior_logprobs.sum()) / tokens, rel=1e-3)


def gradients(trainer: TorchTrainer) -> dict[str, torch.Tensor]:
    """The gradient of the step on batch 0; takes no step."""
    learner: Any = trainer.learner
    found: dict[str, torch.Tensor] = {}

    def keep(number: int, lr_factor: float) -> None:
        found.update({name: parameter.grad.clone() for name, parameter in trainer.model.named_parameters()})

    step, learner.optimizer.step = learner.optimizer.step, keep
    values = trainer.train(batch(0), Step(0), going_on).values
    learner.optimizer.step = step
    learner.clear()
    assert math.isfinite(values["loss"])
    return found


def test_the_effective_sample_size_is_that_of_a_loop_over_trajectories() -> None:
    old, behavior = random(6), random(6, seed=1)
    weights: dict[int, float] = {}
    for place, row in enumerate(ROW.tolist()):
        weights[row] = weights.get(row, 1.0) * math.exp(float(old[place] - behavior[place]))
    wanted = sum(weights.values()) ** 2 / (3 * sum(weight**2 for weight in weights.values()))
    whole_pass, cut = TrajectoryWeights(CPU), TrajectoryWeights(CPU)
    whole_pass.add(old, behavior, ROW)
    for part in (slice(0, 3), slice(3, 6)):
        cut.add(old[part], behavior[part], ROW[part])
    assert whole_pass.ess(LOCAL) == pytest.approx(wanted)
    assert cut.ess(LOCAL) == pytest.approx(wanted)
    assert TrajectoryWeights(CPU).ess(LOCAL) == 1.0
    assert lr_factor(0.25) == 0.5


def test_a_stale_batch_moves_the_model_by_the_scaled_learning_rate(model_directory: Path) -> None:
    """The first step of Adam is the sign of the gradient times the rate, so its size shows the rate."""
    plain = TorchTrainer(config(grad_clip=1e9), model_directory)
    scaled = TorchTrainer(config(grad_clip=1e9, algorithm={"ess_scaled_lr": True}), model_directory)
    before = {name: array.copy() for name, array in plain.weights().items()}
    full, less = (one.train(batch(0), Step(0), going_on).values["lr"] for one in (plain, scaled))
    objective = scaled._objective
    assert full == 1e-3
    assert less == pytest.approx(full * objective.lr_factor())
    assert 0 < less < 0.9 * full
    after = dict(plain.weights().items())
    for name, array in scaled.weights().items():
        wanted = before[name] + (after[name] - before[name]) * (less / full)
        assert np.allclose(array, wanted, atol=1e-6), name


def distilled(name: str) -> tuple[TrainBatch, Objective]:
    how = algorithm(advantage="none", distill_coef=1.0, teacher=name)
    return columns(drawn(0)), Objective(settings(how), CPU)


def test_a_typed_column_teaches_like_a_stage_column() -> None:
    written, found = drawn(0), []
    for name in ("reference/logprobs", "teacher"):
        data, objective = distilled(name)
        if name == "teacher":
            data.token_columns["teacher"] = data.token_stages.pop("reference/logprobs")
        objective.begin()
        objective.take(data)
        logprobs = torch.tensor([token.logprob for one in written for token in one.tokens], requires_grad=True)
        loss = objective.loss(logprobs, tokens_of(data, np.arange(len(written)), CPU))
        (slopes,) = torch.autograd.grad(loss, logprobs)
        found.append((float(loss.detach()), slopes.tolist(), objective.scale(), objective.values()))
    assert found[0] == found[1]
    assert found[0][3]["kl/teacher"] != 0


def test_a_missing_column_of_the_teacher_is_named() -> None:
    data, objective = distilled("judge/logprobs")
    objective.begin()
    objective.take(data)
    logprobs = torch.zeros(int(data.completion_lengths.sum()))
    with pytest.raises(ConfigError, match=r'teacher is "judge/logprobs"; its batches must have this column'):
        objective.loss(logprobs, tokens_of(data, np.arange(len(data.rewards)), CPU))


def test_distillation_has_the_gradient_of_the_reverse_divergence() -> None:
    """On one position, in expectation: every token once, weighted by its probability."""
    student, teacher = random(7).requires_grad_(), random(7, seed=1).log_softmax(-1)
    scores = student.log_softmax(-1)
    exact = (scores.exp() * (scores - teacher)).sum()
    (wanted,) = torch.autograd.grad(exact, student, retain_graph=True)
    gained = teacher_advantage(scores, teacher)
    (found,) = torch.autograd.grad(-(scores.exp().detach() * gained * scores).sum(), student)
    assert not gained.requires_grad
    assert torch.allclose(found, wanted)
