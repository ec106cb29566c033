# pyright: basic, reportMissingImports=false
"""Packed passes need no dense mask: their values and gradients are those of a pass with one."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from staleflow.clients.models.packed_attention import NAME, packed_attention, use_packed_attention
from staleflow.clients.rollout.engines.base import Sampling
from staleflow.clients.rollout.engines.transformers.engine import TransformersEngine, generate
from staleflow.clients.trainer.backends.forward import completion_logprobs
from staleflow.clients.trainer.backends.output_layer import from_logits
from staleflow.clients.trainer.torch_trainer import TorchTrainer
from staleflow.configs.errors import ConfigError
from staleflow.protocols.consistency.ids import Step
from tests.clients.trainer.making import batch, config

SMALL: dict[str, Any] = {
    "vocab_size": 20,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "pad_token_id": 18,
}
MORE: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 4},
    "gemma3_text": {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
}


def model(kind: str) -> Any:
    torch.manual_seed(7)
    build: Any = AutoModelForCausalLM.from_config
    return build(CONFIG_MAPPING[kind](**SMALL, **MORE.get(kind, {}))).eval()


def logprobs(policy: Any, *, packing: bool, boundaries: bool = False) -> Tensor:
    """The log-probabilities of rows with 4 to 17 tokens."""

    def forward(**inputs: Any) -> Tensor:
        logits: Tensor = policy(use_cache=False, **inputs).logits
        return logits

    data, which = batch(0, groups=2, lengths=(5, 14, 1, 7)), np.array([3, 0, 7, 2, 1], np.int64)
    cpu = torch.device("cpu")
    score = from_logits(forward, 0.7)
    return completion_logprobs(score, data, which, cpu, packing=packing, boundaries=boundaries)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "mistral", "gemma3_text", "opt"])
def test_values_and_gradients_are_those_of_the_padded_pass(kind: str) -> None:
    policy = model(kind)
    weights = torch.linspace(-1.0, 1.0, 5 + 14 + 1 + 7 + 7)

    def step(*, packing: bool) -> list[Tensor]:
        policy.zero_grad()
        values = logprobs(policy, packing=packing, boundaries=packing)
        (values * weights[: len(values)]).sum().backward()  # type: ignore[no-untyped-call]
        return [values.detach(), *(parameter.grad.clone() for parameter in policy.parameters())]

    padded = step(packing=False)
    assert use_packed_attention(policy)
    for left, right in zip(padded, step(packing=True), strict=True):
        assert torch.allclose(left, right, rtol=1e-4, atol=1e-5 * max(1.0, float(left.abs().max())))
    assert float(padded[0].std()) > 0.01


def test_no_tensor_of_a_packed_pass_grows_with_its_tokens_squared() -> None:
    """sdpa keeps a dense mask of 64 MiB in float32 for 4,096 tokens."""
    torch.manual_seed(7)
    sizes: dict[str, Any] = SMALL | {"hidden_size": 16, "head_dim": 4, "intermediate_size": 16, "num_hidden_layers": 1}
    build: Any = AutoModelForCausalLM.from_config
    kind: Any = CONFIG_MAPPING["llama"]
    policy, rows, length = build(kind(**sizes | {"max_position_embeddings": 2048})), 4, 1024
    ids, positions = torch.arange(rows * length)[None] % 20, torch.arange(length).repeat(rows)[None]
    ends = torch.arange(0, rows * length + 1, length, dtype=torch.int32)
    largest = [0]

    def keep(tensor: Tensor) -> Tensor:
        largest[0] = max(largest[0], tensor.untyped_storage().nbytes())
        return tensor

    def kept(**boundaries: Any) -> int:
        largest[0] = 0
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            policy(input_ids=ids, position_ids=positions, use_cache=False, **boundaries)
        return largest[0]

    dense = kept()
    assert use_packed_attention(policy)
    assert dense == 4 * (rows * length) ** 2
    assert kept(cu_seq_lens_q=ends, max_length_q=length) < dense // 50


def test_a_trainer_uses_it_and_its_engine_generates_as_before(model_directory: Path) -> None:
    padded = TorchTrainer(config(), model_directory)
    packed = TorchTrainer(config(packing=True, share_prompts=False), model_directory)
    sampling = Sampling(max_new_tokens=8)
    written = []
    for trainer in (padded, packed):
        trainer.train(batch(0), Step(0), lambda: False)
        written.append(generate(TransformersEngine(trainer.model, [19]), [[1, 10, 2]], 4, sampling, seed=1)[0])
    assert packed.model.config._attn_implementation == NAME
    assert [one.token_ids.tolist() for one in written[0]] == [one.token_ids.tolist() for one in written[1]]


def test_a_model_that_gives_no_boundaries_to_its_attention_packs_with_a_dense_mask(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def without_boundaries(*arguments: Any, **more: Any) -> Any:
        return packed_attention(*arguments, **{key: value for key, value in more.items() if key != "cu_seq_lens_q"})

    from transformers import AttentionInterface

    monkeypatch.setitem(AttentionInterface._global_mapping, NAME, without_boundaries)
    with caplog.at_level(logging.INFO):
        trainer = TorchTrainer(config(packing=True, share_prompts=False), model_directory)
    assert "dense attention mask" in caplog.text
    padded = TorchTrainer(config(), model_directory)
    first, second = (each.train(batch(0), Step(0), lambda: False).values["loss"] for each in (padded, trainer))
    assert second == pytest.approx(first, rel=1e-4, abs=1e-6)
    trainer.load(None)
    trainer.train(batch(1), Step(1), lambda: False)
    assert trainer.model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(("name", "dense"), [("sdpa", False), ("eager", True)])
def test_the_implementation_is_chosen_by_name(model_directory: Path, name: str, dense: bool) -> None:
    trainer = TorchTrainer(config(packing=True, attention=name, share_prompts=False), model_directory)
    assert trainer.model.config._attn_implementation == (name if dense else NAME)


@pytest.mark.parametrize("name", ["flash_attention_2", "flash_attention_3", "flex_attention"])
def test_an_implementation_for_gpus_is_refused_on_a_cpu(model_directory: Path, name: str) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(ConfigError, match=f'trainer.attention is "{name}"; it needs a GPU'):
        TorchTrainer(config(attention=name), model_directory)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("window", [None, 5])
def test_the_kernel_of_a_gpu_agrees_with_one_trajectory_after_the_other(window: int | None) -> None:
    torch.manual_seed(7)
    query, key, value = (torch.randn(1, heads, 32, 64) for heads in (4, 2, 2))
    ends, module = torch.tensor([0, 3, 20, 32], dtype=torch.int32), torch.nn.Module()
    module.num_key_value_groups = 2  # type: ignore[assignment]

    def attend(device: str, dtype: torch.dtype) -> Tensor:
        q, k, v = (states.to(device, dtype) for states in (query, key, value))
        more: dict[str, Any] = {"cu_seq_lens_q": ends.to(device), "max_length_q": 17, "sliding_window": window}
        return packed_attention(module, q, k, v, None, **more)[0].float().cpu()

    assert torch.allclose(attend("cuda", torch.bfloat16), attend("cpu", torch.float32), atol=0.05)
