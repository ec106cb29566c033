# pyright: basic, reportMissingImports=false
"""Passes without padding compute the same values as padded ones."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, FalconConfig, OPTConfig

from staleflow.clients.models.passes import packed_passes
from staleflow.clients.rollout.engines.base import Sampling
from staleflow.clients.rollout.engines.transformers.engine import TransformersEngine, generate
from staleflow.clients.trainer.algorithms.objective import tokens_of
from staleflow.clients.trainer.backends.forward import completion_logprobs
from staleflow.clients.trainer.backends.output_layer import from_logits
from staleflow.clients.trainer.torch_trainer import TorchTrainer
from staleflow.configs.errors import ConfigError
from staleflow.configs.schema import Config
from staleflow.protocols.consistency.ids import Step
from tests.clients.trainer.making import batch, config


def test_passes_have_about_equally_many_tokens_and_a_row_too_long_goes_alone() -> None:
    found = packed_passes(np.array([4, 50, 6, 5, 5], np.int64), 12)
    assert [rows.tolist() for rows in found] == [[1], [0, 2], [3, 4]]
    assert packed_passes(np.array([], np.int64), 12) == []


@given(st.lists(st.integers(1, 60), min_size=1, max_size=30), st.integers(1, 100))
def test_every_row_is_in_one_pass_and_no_pass_is_too_large(lengths: list[int], micro_tokens: int) -> None:
    found = packed_passes(np.array(lengths, np.int64), micro_tokens)
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
            score = from_logits(forward, 0.7)
            return completion_logprobs(score, data, which, torch.device("cpu"), packing=packing)

    padded, packed = logprobs(False), logprobs(True)
    assert (
        len(padded) == len(tokens_of(data, which, torch.device("cpu")).row) == int(data.completion_lengths[which].sum())
    )
    assert torch.allclose(padded, packed, atol=1e-5)
    assert float(padded.std()) > 0.01  # a model that ignores its context would fail here


def test_a_step_of_packed_passes_is_the_step_of_padded_ones(model_directory: Path) -> None:
    padded = TorchTrainer(config(micro_tokens=40, share_prompts=False), model_directory)
    packed = TorchTrainer(config(micro_tokens=40, packing=True, share_prompts=False), model_directory)
    first = padded.train(batch(0), Step(0), lambda: False).values
    assert packed.train(batch(0), Step(0), lambda: False).values == pytest.approx(first, rel=1e-4, abs=1e-6)
    for (name, left), right in zip(padded.weights().items(), dict(packed.weights().items()).values(), strict=True):
        assert np.allclose(left, right, atol=2e-5), name


PACKED = ["qwen3", "mixtral", "opt", "lfm2"]


@pytest.mark.parametrize(("kind", "dtype"), [(kind, dtype) for kind in PACKED for dtype in ("float32", "bfloat16")])
def test_an_architecture_that_would_mix_packed_trajectories_is_refused(tmp_path: Path, kind: str, dtype: str) -> None:
    """An architecture whose experts get other numbers of tokens beside another row is accepted: the difference is
    rounding."""
    table = msgspec.to_builtins(config(packing=True, share_prompts=False)) | {"model": {"dtype": dtype}}
    settings, directory = msgspec.convert(table, Config), built(kind, tmp_path)
    if kind == "lfm2":
        with pytest.raises(ConfigError, match=r"trainer\.packing is true; this model mixes packed"):
            TorchTrainer(settings, directory)
    else:
        trainer = TorchTrainer(settings, directory)
        assert all(parameter.grad is None for parameter in trainer.model.parameters())


SMALL: dict[str, Any] = {
    "vocab_size": 20,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "pad_token_id": 18,
}


def built(kind: str, directory: Path) -> Path:
    """A model directory of this architecture."""
    torch.manual_seed(7)
    match kind:
        case "opt":  # its layers store dropout as a number
            settings: Any = OPTConfig(**SMALL, ffn_dim=64, word_embed_proj_dim=32, max_position_embeddings=128)
        case "falcon":  # its attention stores dropout as a child, its configuration as a number
            settings = FalconConfig(**SMALL, hidden_dropout=0.2, attention_dropout=0.2, bos_token_id=1)
        case "qwen3" | "mixtral" | "lfm2":
            more: dict[str, Any] = {
                "intermediate_size": 64,
                "num_key_value_heads": 1,
                "head_dim": 16,
                "full_attn_idxs": [1],
            }
            settings = CONFIG_MAPPING[kind](**SMALL, **more)
        case _:
            raise ValueError(kind)
    build: Any = AutoModelForCausalLM.from_config
    build(settings).save_pretrained(directory)
    return directory


@pytest.mark.parametrize("kind", ["qwen3", "opt", "falcon"])
def test_gradient_checkpointing_changes_memory_and_nothing_else(
    model_directory: Path, tmp_path: Path, kind: str
) -> None:
    directory = model_directory if kind == "qwen3" else built(kind, tmp_path)
    kept = TorchTrainer(config(), directory)
    again = TorchTrainer(config(gradient_checkpointing=True), directory)
    computed: list[int] = []
    some = next(module for module in again.model.modules() if isinstance(module, torch.nn.Linear))
    some.register_forward_pre_hook(lambda *_: computed.append(1))
    for step in range(2):
        first = kept.train(batch(step), Step(step), lambda: False).values
        second = again.train(batch(step), Step(step), lambda: False).values
        assert {name: second[name] for name in ("loss", "grad_norm")} == pytest.approx(
            {name: first[name] for name in ("loss", "grad_norm")}, rel=1e-6
        )
    assert len(computed) == 4


def test_an_engine_writes_with_a_model_that_checkpoints_gradients_and_leaves_it_so(model_directory: Path) -> None:
    kept = TorchTrainer(config(), model_directory).model
    again = TorchTrainer(config(gradient_checkpointing=True), model_directory).model
    training = [module.training for module in again.modules()]
    sampling = Sampling(max_new_tokens=8, temperature=1.0)
    written = [generate(TransformersEngine(model, [19]), [[1, 10, 2]], 4, sampling, seed=1) for model in (kept, again)]
    assert [one.token_ids.tolist() for one in written[0][0]] == [one.token_ids.tolist() for one in written[1][0]]
    assert [module.training for module in again.modules()] == training
    assert 2 <= sum(training) < len(training)
