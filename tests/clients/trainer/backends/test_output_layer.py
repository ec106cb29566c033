# pyright: basic, reportMissingImports=false
"""Logits exist only where the loss needs them and in chunks; log-probabilities and gradients are the same."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from staleflow.clients.trainer.backends.forward import completion_logprobs
from staleflow.clients.trainer.backends.output_layer import OutputLayer, Score, from_logits
from staleflow.clients.trainer.torch_trainer import TorchTrainer
from staleflow.protocols.consistency.ids import Step
from tests.clients.trainer.making import batch, config

SMALL: dict[str, Any] = {
    "vocab_size": 20,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "pad_token_id": 18,
}
MORE: dict[str, dict[str, Any]] = {
    "gemma2": {"final_logit_softcapping": 3.0},
    "granite": {"logits_scaling": 2.0},
    "cohere": {"logit_scale": 0.5},
}
CPU = torch.device("cpu")


def model(kind: str, **more: Any) -> Any:
    torch.manual_seed(7)
    build: Any = AutoModelForCausalLM.from_config
    return build(CONFIG_MAPPING[kind](**SMALL | MORE.get(kind, {}) | more)).eval()


def gradients(policy: Any, score: Score, *, packing: bool) -> list[Tensor]:
    """The log-probabilities of some rows, and the gradient of a weighted sum of them."""
    data, which = batch(0), np.array([3, 0, 7, 2], np.int64)
    policy.zero_grad()
    values = completion_logprobs(score, data, which, CPU, packing=packing)
    (values * torch.linspace(-1.0, 1.0, len(values))).sum().backward()  # type: ignore[no-untyped-call]
    return [values.detach(), *(parameter.grad.clone() for parameter in policy.parameters())]


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("chunk", [0, 1, 5])
@pytest.mark.parametrize("tied", [False, True])
def test_values_and_gradients_are_those_of_whole_logits(chunk: int, tied: bool, packing: bool) -> None:
    policy = model("qwen3", tie_word_embeddings=tied)

    def forward(**inputs: Any) -> Tensor:
        logits: Tensor = policy(use_cache=False, **inputs).logits
        return logits

    whole = gradients(policy, from_logits(forward, 0.7), packing=packing)
    output = OutputLayer(chunk, 0.7)
    output.apply(policy)
    output.check(policy, forward, CPU, bool)
    for left, right in zip(whole, gradients(policy, output.score(forward), packing=packing), strict=True):
        assert torch.allclose(left, right, rtol=1e-5, atol=1e-6)
    assert float(whole[0].std()) > 0.01
    assert forward(input_ids=torch.tensor([[1, 2, 3]])).shape == (1, 3, 20)  # other callers get logits


def test_only_the_logits_of_one_chunk_exist_at_a_time() -> None:
    """The logits of this pass have 800 x 5,000 numbers, of which the loss needs 776 x 5,000."""
    policy, data = model("llama", vocab_size=5_000), batch(0, groups=4, lengths=(97, 97))
    rows: list[int] = []

    def forward(**inputs: Any) -> Tensor:
        logits: Tensor = policy(use_cache=False, **inputs).logits
        return logits

    def largest(score: Score) -> int:
        sizes: list[int] = []

        def keep(tensor: Tensor) -> Tensor:
            sizes.append(tensor.untyped_storage().nbytes())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            completion_logprobs(score, data, np.arange(8), CPU, packing=False).sum().backward()  # type: ignore[no-untyped-call]
        return max(sizes)

    whole = largest(from_logits(forward, 1.0))
    layer = policy.get_output_embeddings()
    logits_of = layer.forward

    def counted(hidden: Tensor) -> Tensor:
        rows.append(hidden.shape[0])
        logits: Tensor = logits_of(hidden)
        return logits

    layer.forward = counted
    output = OutputLayer(100, 1.0)
    output.apply(policy)
    assert whole == 4 * 800 * 5_000
    assert largest(output.score(forward)) <= 4 * 5_000 * SMALL["hidden_size"]  # the layer's own weight
    assert rows == [*([100] * 7), 76, 76, *([100] * 7)]  # forward, then again backward


@pytest.mark.parametrize("kind", ["gemma2", "granite", "cohere"])
def test_a_model_that_scales_or_caps_its_logits_uses_whole_ones(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    model(kind).save_pretrained(tmp_path)
    with caplog.at_level(logging.INFO):
        trainer = TorchTrainer(config(logit_chunk=4), tmp_path)
    assert "trainer.logit_chunk has no effect" in caplog.text

    def forward(**inputs: Any) -> Tensor:
        logits: Tensor = trainer.model(use_cache=False, **inputs).logits
        return logits

    score = trainer._passes._output.score(forward)
    found, expected = (gradients(trainer.model, each, packing=False) for each in (score, from_logits(forward, 1.0)))
    assert all(torch.equal(left, right) for left, right in zip(found, expected, strict=True))


def test_a_step_in_chunks_is_the_step_of_whole_logits(
    model_directory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        whole, chunks = (TorchTrainer(config(logit_chunk=chunk), model_directory) for chunk in (0, 4))
    assert "logit_chunk" not in caplog.text
    for step in range(2):
        first, second = (each.train(batch(step), Step(step), lambda: False).values for each in (whole, chunks))
        assert second == pytest.approx(first, rel=1e-5, abs=1e-6)
        checkpoint = tmp_path / str(step)
        checkpoint.mkdir()
        chunks.save(checkpoint)
        chunks.load(checkpoint)  # its output layer works in chunks again
