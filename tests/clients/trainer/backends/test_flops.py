# pyright: basic, reportMissingImports=false
"""The trainer reports model FLOP utilisation where the device's peak is known."""

from pathlib import Path
from typing import Any

import pytest
import torch

from staleflow.clients.trainer.backends.collectives import OneRank
from staleflow.clients.trainer.backends.flops import FlopsMeter, active_parameters, peak_flops, step_flops
from staleflow.clients.trainer.torch_trainer import TorchTrainer
from staleflow.configs.schema import Model
from staleflow.protocols.consistency.ids import Step
from tests.clients.trainer.making import batch, config


def test_a_peak_is_found_by_the_devices_name_and_dtype() -> None:
    coarse, exact, tf32 = Model(dtype="bfloat16"), Model(), Model(matmul_precision="high")
    assert peak_flops("NVIDIA H100 80GB HBM3", coarse) == 989e12
    assert peak_flops("NVIDIA H100 PCIe", coarse) == 756e12
    assert peak_flops("NVIDIA A100-SXM4-80GB", exact) == 19.5e12
    assert peak_flops("NVIDIA A100-SXM4-80GB", tf32) == 156e12
    assert peak_flops("NVIDIA A10G", coarse) == 70e12
    assert peak_flops("Some other chip", coarse) is None


def test_a_step_costs_six_operations_a_parameter_and_token_and_its_attention() -> None:
    assert step_flops(1000, 2, 8, tokens=10 + 20, squares=100 + 400) == 6 * 1000 * 30 + 6 * 2 * 8 * (100 + 400)


def test_a_cpu_has_no_utilisation(model_directory: Path) -> None:
    values = TorchTrainer(config(), model_directory).train(batch(0), Step(0), lambda: False).values
    assert "perf/mfu" not in values


def test_a_step_that_took_no_longer_than_its_arithmetic_used_all_of_the_device(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks, data = OneRank(torch.device("cpu")), batch(0)
    speed = FlopsMeter(TorchTrainer(config(), model_directory).model, ranks, Model())
    monkeypatch.setattr(speed, "_peak", 1e6)
    embeddings, layer = 20 * 32, 32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 64 + 2 * 16 + 2 * 32
    work = {"tokens": int(data.sequence_lengths.sum()), "squares": int((data.sequence_lengths**2).sum())}
    flops = step_flops(embeddings + 2 * layer + 32, 2, 32, **work)
    speed.count(**work, logits=work["tokens"])
    assert speed.values(flops / 1e6)["perf/mfu"] == pytest.approx(1.0)
    speed.begin()
    speed.count(**work, logits=0)
    assert speed.values(flops / 1e6)["perf/mfu"] == pytest.approx(1.0 - 6 * embeddings * work["tokens"] / flops)


def mixture(**more: Any) -> Any:
    """One layer of eight experts, of which each token uses two, and one expert that every token passes through."""
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    config = Qwen2MoeConfig(
        vocab_size=20,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=24,
        pad_token_id=None,
        **more,
    )
    return Qwen2MoeForCausalLM(config)  # type: ignore[no-untyped-call]


def test_of_a_mixture_of_experts_a_token_goes_through_those_that_it_is_routed_to() -> None:
    model, expert = mixture(), 3 * 32 * 16
    every = sum(parameter.numel() for parameter in model.parameters())
    assert active_parameters(model, model.config) == every - (8 - 2) * expert


def test_a_mixture_that_does_not_say_how_many_experts_a_token_has_gives_no_utilisation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, ranks = mixture(), OneRank(torch.device("cpu"))
    known = FlopsMeter(model, ranks, Model())
    model.config.num_experts_per_tok = 0
    unknown = FlopsMeter(model, ranks, Model())
    for speed in (known, unknown):
        monkeypatch.setattr(speed, "_peak", 1e6)
    assert ("perf/mfu" in known.values(1.0), unknown.values(1.0)) == (True, {})


def test_experts_that_only_the_configuration_tells_of_cannot_be_counted(model_directory: Path) -> None:
    model = TorchTrainer(config(), model_directory).model
    assert active_parameters(model, model.config) == sum(parameter.numel() for parameter in model.parameters())
    model.config.num_local_experts, model.config.num_experts_per_tok = 8, 2
    assert active_parameters(model, model.config) is None
