# pyright: basic, reportMissingImports=false
"""The optimizer follows AdamW's formula on float32 masters, and resumes from its own state bit by bit."""

from typing import Any

import pytest
import torch
from torch import nn

from staleflow.clients.trainer.backends.optimizer import MasterAdamW
from tests.clients.trainer.making import config

GRADIENTS = (0.3, -0.7, 1e-6)


def stepped(model: nn.Linear, optimizer: MasterAdamW, gradients: tuple[float, ...], first: int = 0) -> None:
    for number, gradient in enumerate(gradients, first):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, gradient)
        optimizer.collect()
        optimizer.step(number)


def by_hand(weight: float, gradients: tuple[float, ...], *, lr: float, eps: float, decay: float) -> float:
    """Loshchilov and Hutter, Decoupled Weight Decay Regularization (arXiv 1711.05101), algorithm 2."""
    first = second = 0.0
    for number, gradient in enumerate(gradients, 1):
        first, second = 0.9 * first + 0.1 * gradient, 0.95 * second + 0.05 * gradient**2
        update = first / (1 - 0.9**number) / ((second / (1 - 0.95**number)) ** 0.5 + eps)
        weight = weight * (1 - lr * decay) - lr * update
    return weight


@pytest.mark.parametrize("keys", [{}, {"adam_eps": 0.1}, {"weight_decay": 0.5, "lr": 0.01}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_are_those_of_the_formula(keys: dict[str, Any], dtype: torch.dtype) -> None:
    settings = config(**{"lr": 0.05, "adam_eps": 1e-8} | keys).trainer
    model = nn.Linear(4, 3, bias=False).to(dtype)
    start = model.weight.detach().to(torch.float32).flatten().tolist()
    optimizer = MasterAdamW(model, settings)
    stepped(model, optimizer, GRADIENTS)
    rounded = tuple(float(torch.tensor(one).to(dtype)) for one in GRADIENTS)
    expected = [
        by_hand(one, rounded, lr=settings.lr, eps=settings.adam_eps, decay=settings.weight_decay) for one in start
    ]
    assert optimizer.master_of(model.weight).flatten().tolist() == pytest.approx(expected, rel=1e-5, abs=1e-7)


def test_a_restored_optimizer_continues_bit_by_bit() -> None:
    settings, model = config(lr=0.05).trainer, nn.Linear(4, 3)
    optimizer = MasterAdamW(model, settings)
    stepped(model, optimizer, GRADIENTS)
    other = nn.Linear(4, 3)
    other.load_state_dict(model.state_dict())
    restored = MasterAdamW(other, settings)
    restored.load({name: tensor.clone() for name, tensor in optimizer.tensors().items()})
    for at, how in ((model, optimizer), (other, restored)):
        stepped(at, how, GRADIENTS, first=3)
    assert torch.equal(model.weight, other.weight)
    assert torch.equal(model.bias, other.bias)
