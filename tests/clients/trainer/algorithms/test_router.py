# pyright: basic, reportMissingImports=false
"""The auxiliary loss of a mixture of experts has the same weight however a batch is divided."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from staleflow.clients.trainer.torch_trainer import TorchTrainer
from staleflow.configs.errors import ConfigError
from staleflow.protocols.consistency.ids import Step
from tests.clients.trainer.backends.test_fused_weights import saved
from tests.clients.trainer.making import batch, config
from tests.clients.trainer.ranked import ranked


def trained(trainer: TorchTrainer, lengths: tuple[int, ...] = (5, 9, 2, 7)) -> dict[str, float]:
    return trainer.train(batch(0, lengths=lengths), Step(0), lambda: False).values


def gradients(directory: Path, **keys: Any) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """The gradient of one step before the optimizer changes it, and its metrics."""
    trainer: Any = TorchTrainer(config(grad_clip=1e9, **keys), directory)
    found: dict[str, torch.Tensor] = {}
    step = trainer.learner.step

    def look(number: int, *, scale: float, **others: Any) -> float:
        found.update({name: p.grad * scale for name, p in trainer.model.named_parameters() if p.grad is not None})
        return float(step(number, scale=scale, **others))

    trainer.learner.step = look
    return found, trained(trainer)


@pytest.mark.parametrize("algorithm", [{}, {"loss": "gspo"}, {"advantage": "dr_grpo"}])
def test_its_gradient_adds_the_mean_over_the_passes(tmp_path: Path, algorithm: dict[str, Any]) -> None:
    """Every pass has one trajectory, so that the mean over passes is known from the model's own loss of each."""
    directory, rows = saved(tmp_path), batch(0)
    keys: dict[str, Any] = {"micro_tokens": 1, "algorithm": algorithm}
    without, _ = gradients(directory, **keys)
    added, values = gradients(directory, router_aux_coef=0.25, **keys)
    model = TorchTrainer(config(), directory).model
    by_token = not algorithm
    weights = rows.loss_mask.sum(axis=1) if by_token else np.ones(len(rows.rewards))
    mean = torch.zeros(())
    for ids, length, weight in zip(rows.input_ids, rows.sequence_lengths, weights, strict=True):
        output = model(input_ids=torch.from_numpy(ids[:length])[None].long(), output_router_logits=True)
        mean = mean + output.aux_loss * float(weight / weights.sum())
    model.zero_grad()
    (0.25 * mean).backward()  # type: ignore[no-untyped-call]
    assert values["router/aux_loss"] == pytest.approx(mean.item(), rel=1e-5)
    assert mean.item() > 1
    name = "model.layers.0.mlp.gate.weight"
    own = model.get_parameter(name).grad
    assert own.abs().max() > 1e-5
    torch.testing.assert_close(added[name] - without[name], own, rtol=1e-3, atol=1e-7)


def test_passes_and_updates_do_not_change_what_it_measures(tmp_path: Path) -> None:
    directory = saved(tmp_path)
    keys: dict[str, Any] = {"router_aux_coef": 0.01, "share_prompts": False}
    whole, packed = (
        trained(TorchTrainer(config(packing=packing, **keys), directory))["router/aux_loss"]
        for packing in (False, True)
    )
    assert packed == pytest.approx(whole, rel=1e-5)
    checkpointed = trained(TorchTrainer(config(gradient_checkpointing=True, **keys), directory))["router/aux_loss"]
    assert checkpointed == pytest.approx(whole, rel=1e-5)
    assert trained(TorchTrainer(config(minibatches=3, lr=1e-9, **keys), directory))["router/aux_loss"] > 1


def test_the_models_own_coefficient_counts_only_if_it_outputs_router_logits(tmp_path: Path) -> None:
    directory = saved(tmp_path)
    assert "router/aux_loss" not in trained(TorchTrainer(config(), directory))
    text = (directory / "config.json").read_text()
    assert '"output_router_logits": false' in text
    (directory / "config.json").write_text(
        text.replace('"output_router_logits": false', '"output_router_logits": true')
    )
    assert trained(TorchTrainer(config(), directory))["router/aux_loss"] > 1
    assert "router/aux_loss" not in trained(TorchTrainer(config(router_aux_coef=0.0), directory))


def test_a_model_without_a_router_is_refused(tmp_path: Path) -> None:
    directory = saved(tmp_path, "qwen3")
    with pytest.raises(ConfigError, match=r"trainer\.router_aux_coef is 0\.1; this model has no router to balance"):
        TorchTrainer(config(router_aux_coef=0.1), directory)


@pytest.mark.slow
def test_ranks_weight_it_by_their_tokens(tmp_path: Path) -> None:
    """Every pass has one trajectory on each rank, so that ranks and passes divide the batch alike."""
    directory, keys = saved(tmp_path / "model"), {"router_aux_coef": 0.25, "micro_tokens": 1}
    alone = ranked(config(**keys), directory, tmp_path / "one", steps=[0, 1])
    two = ranked(config(backend="ddp", **keys), directory, tmp_path / "two", 2, steps=[0, 1])
    assert two.column("router/aux_loss") == pytest.approx(alone.column("router/aux_loss"), rel=1e-4)
    for name, array in alone.weights.items():
        np.testing.assert_allclose(two.weights[name], array, atol=2e-5, err_msg=name)
