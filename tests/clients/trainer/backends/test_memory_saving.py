# pyright: basic, reportMissingImports=false
"""Recomputed and offloaded state: the same gradients, less arithmetic or less memory."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from staleflow.clients.trainer.backends.activation_offload import activations_in_main_memory
from staleflow.clients.trainer.backends.optimizer import MasterAdamW
from staleflow.clients.trainer.torch_trainer import TorchTrainer
from staleflow.protocols.consistency.ids import Step
from tests.clients.trainer.making import batch, config
from tests.clients.trainer.ranked import ranked

KEYS: list[dict[str, Any]] = [
    {"share_prompts": True},
    {"share_prompts": False},
    {"share_prompts": False, "packing": True},
]


@pytest.mark.parametrize("keys", KEYS, ids=["shared", "padded", "packed"])
@pytest.mark.parametrize("how", ["selective", True])
def test_recomputed_activations_change_no_gradient(
    model_directory: Path, keys: dict[str, Any], how: str | bool
) -> None:
    stored, computed = (
        TorchTrainer(config(gradient_checkpointing=value, **keys), model_directory) for value in (False, how)
    )
    for step in range(2):
        expected, values = (
            trainer.train(batch(step), Step(step), lambda: False).values for trainer in (stored, computed)
        )
        for name in ("loss", "grad_norm"):
            assert values[name] == pytest.approx(expected[name], rel=1e-6)
    assert computed._passes._shares_prompts == keys["share_prompts"]


def test_selective_checkpointing_recomputes_no_product(model_directory: Path) -> None:
    def products(how: str | bool) -> int:
        trainer = TorchTrainer(config(gradient_checkpointing=how, share_prompts=False), model_directory)
        with FlopCounterMode(display=False) as counter:
            trainer.train(batch(0), Step(0), lambda: False)
        return int(counter.get_total_flops())

    assert products(False) == products("selective") < products(True)


def test_selective_checkpointing_stores_less_than_none(model_directory: Path) -> None:
    """Bytes that a pass keeps for its backward pass, outside of weights."""

    def kept(**keys: Any) -> int:
        trainer, sizes = TorchTrainer(config(share_prompts=False, **keys), model_directory), dict[int, int]()

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        weights = {p.untyped_storage().data_ptr() for p in trainer.model.parameters()}
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            ids = torch.arange(64).view(4, 16) % 18
            output = trainer.model(input_ids=ids, use_cache=False).logits
        total = sum(size for place, size in sizes.items() if place not in weights)
        assert output.requires_grad
        return total

    assert kept(gradient_checkpointing=True) < kept()
    assert kept(gradient_checkpointing="selective") < kept()


def test_offloaded_activations_give_the_same_gradients_and_weights_are_not_copied() -> None:
    torch.manual_seed(0)
    model, inputs = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 4)), torch.randn(5, 8)
    copies: list[torch.Size] = []
    empty = torch.empty

    def counted(*arguments: Any, **settings: Any) -> torch.Tensor:
        copies.append(torch.Size(arguments[0]))
        return empty(*arguments, **settings)

    model(inputs).square().sum().backward()
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad(set_to_none=True)
    with pytest.MonkeyPatch.context() as patch, activations_in_main_memory(model, inputs.device, min_bytes=1):
        patch.setattr(torch, "empty", counted)
        output = model(inputs)
    output.square().sum().backward()
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), expected, strict=True))  # type: ignore[arg-type]
    assert sorted(copies) == [torch.Size([5, 8]), torch.Size([5, 16]), torch.Size([5, 16])]


@pytest.mark.slow
@pytest.mark.parametrize("nproc", [1, pytest.param(2, marks=pytest.mark.long)])
def test_offloaded_parameters_of_fsdp_train_and_resume_as_others(
    model_directory: Path, tmp_path: Path, nproc: int
) -> None:
    offloaded, saved = config(backend="fsdp", offload="parameters"), tmp_path / "saved"
    alone = TorchTrainer(config(), model_directory)
    expected = [alone.train(batch(step), Step(step), lambda: False).values["loss"] for step in range(4)]
    straight = ranked(
        offloaded, model_directory, tmp_path / "one", nproc, steps=list(range(4)), save=saved, save_after=1
    )
    assert straight.column("loss") == pytest.approx(expected, rel=1e-4, abs=2e-6)
    resumed = ranked(offloaded, model_directory, tmp_path / "two", nproc, steps=[2, 3], load=saved)
    assert resumed.column("loss") == straight.column("loss")[2:]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_offloaded_optimizer_keeps_its_state_in_main_memory(dtype: torch.dtype) -> None:
    models = [nn.Linear(8, 4).to("cuda", dtype) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [
        MasterAdamW(model, config(offload=offload).trainer)
        for model, offload in zip(models, ("none", "optimizer"), strict=True)
    ]
    for step in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            for number in range(2):
                model(torch.full((3, 8), 0.1 * number + step, device="cuda", dtype=dtype)).square().sum().backward()
                optimizer.collect()
            optimizer.clip()
            optimizer.step(step)
    assert {tensor.device.type for tensor in optimizers[1].tensors().values()} == {"cpu"}
    assert models[1].weight.is_cuda
    assert torch.allclose(models[0].weight, models[1].weight, rtol=1e-4)
