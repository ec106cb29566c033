# pyright: basic, reportMissingImports=false
"""Passes without padding, and that they compute what padded ones do."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from staleflow.clients.trainer.objective import tokens_of
from staleflow.clients.trainer.packing import packs
from staleflow.clients.trainer.passes import completion_logprobs
from staleflow.clients.trainer.torch_trainer import TorchTrainer
from staleflow.protocols.consistency.ids import Step
from tests.clients.trainer.making import batch, config


def test_passes_have_about_equally_many_tokens_and_a_row_too_long_goes_alone() -> None:
    found = packs(np.array([4, 50, 6, 5, 5], np.int64), 12)
    assert [rows.tolist() for rows in found] == [[1], [0, 2], [3, 4]]
    assert packs(np.array([], np.int64), 12) == []


@given(st.lists(st.integers(1, 60), min_size=1, max_size=30), st.integers(1, 100))
def test_every_row_is_in_one_pass_and_no_pass_is_too_large(lengths: list[int], micro_tokens: int) -> None:
    found = packs(np.array(lengths, np.int64), micro_tokens)
    assert sorted(row for rows in found for row in rows.tolist()) == list(range(len(lengths)))
    for rows in found:
        assert len(rows) == 1 or sum(lengths[row] for row in rows) <= micro_tokens


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_log_probabilities_are_the_padded_ones(model_directory: Path, attention: str) -> None:
    trainer, data = TorchTrainer(config(), model_directory), batch(0)
    trainer.model.set_attn_implementation(attention)
    which = np.array([3, 0, 7, 2], np.int64)

    def logprobs(packing: bool) -> torch.Tensor:
        def forward(**inputs: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = trainer.model(use_cache=False, **inputs).logits
            return logits

        with torch.no_grad():
            return completion_logprobs(forward, data, which, torch.device("cpu"), 0.7, packing=packing)

    padded, packed = logprobs(False), logprobs(True)
    assert (
        len(padded) == len(tokens_of(data, which, torch.device("cpu")).row) == int(data.completion_lengths[which].sum())
    )
    assert torch.allclose(padded, packed, atol=1e-5)
    assert float(padded.std()) > 0.01  # a model that ignores its context would pass


def test_a_step_of_packed_passes_is_the_step_of_padded_ones(model_directory: Path) -> None:
    padded = TorchTrainer(config(micro_tokens=40), model_directory)
    packed = TorchTrainer(config(micro_tokens=40, packing=True), model_directory)
    first = padded.train(batch(0), Step(0), lambda: False).values
    assert packed.train(batch(0), Step(0), lambda: False).values == pytest.approx(first, rel=1e-4, abs=1e-6)
    for (name, left), right in zip(padded.weights().items(), dict(packed.weights().items()).values(), strict=True):
        assert np.allclose(left, right, atol=2e-5), name


def test_gradient_checkpointing_changes_memory_and_nothing_else(model_directory: Path) -> None:
    kept = TorchTrainer(config(), model_directory)
    again = TorchTrainer(config(gradient_checkpointing=True), model_directory)
    computed = []
    again.model.model.layers[0].input_layernorm.register_forward_pre_hook(lambda *_: computed.append(1))
    first = kept.train(batch(0), Step(0), lambda: False).values
    assert again.train(batch(0), Step(0), lambda: False).values == pytest.approx(first, rel=1e-6)
    assert len(computed) == 2
