# pyright: basic, reportMissingImports=false
"""Model FLOP utilisation where the device's peak is known."""

from pathlib import Path

import numpy as np
import pytest
import torch

from staleflow.clients.trainer.ranks import OneRank
from staleflow.clients.trainer.speed import Speed, peak_flops, step_flops
from staleflow.clients.trainer.torch_trainer import TorchTrainer
from staleflow.protocols.consistency.ids import Step
from tests.clients.trainer.making import batch, config


def test_a_peak_is_found_by_the_devices_name_and_dtype() -> None:
    assert peak_flops("NVIDIA H100 80GB HBM3", "bfloat16") == 989e12
    assert peak_flops("NVIDIA H100 PCIe", "bfloat16") == 756e12
    assert peak_flops("NVIDIA A100-SXM4-80GB", "float32") == 19.5e12
    assert peak_flops("NVIDIA A10G", "bfloat16") == 70e12
    assert peak_flops("Some other chip", "bfloat16") is None


def test_a_step_costs_six_operations_a_parameter_and_token_and_its_attention() -> None:
    assert step_flops(1000, 2, 8, np.array([10, 20])) == 6 * 1000 * 30 + 6 * 2 * 8 * (100 + 400)


def test_a_cpu_has_no_utilisation(model_directory: Path) -> None:
    values = TorchTrainer(config(), model_directory).train(batch(0), Step(0), lambda: False).values
    assert "perf/mfu" not in values


def test_a_step_that_took_no_longer_than_its_arithmetic_used_all_of_the_device(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks, data = OneRank(torch.device("cpu")), batch(0)
    speed = Speed(TorchTrainer(config(), model_directory).model, ranks, "float32")
    monkeypatch.setattr(speed, "_peak", 1e6)
    embeddings, layer = 20 * 32, 32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 64 + 2 * 16 + 2 * 32
    flops = step_flops(embeddings + 2 * layer + 32, 2, 32, data.sequence_lengths)
    assert speed.values(data, flops / 1e6)["perf/mfu"] == pytest.approx(1.0)
