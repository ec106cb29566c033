# pyright: basic, reportMissingImports=false
"""A padded pass needs no attention mask, except for models that read what follows a row."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from staleflow.clients.trainer.backends.forward import completion_logprobs
from staleflow.clients.trainer.backends.output_layer import from_logits
from staleflow.clients.trainer.torch_trainer import TorchTrainer
from staleflow.examples.quickstart.model import character_tokenizer, shape
from staleflow.protocols.consistency.ids import Step
from tests.clients.trainer.making import batch, config

SMALL: dict[str, Any] = {
    "vocab_size": 20,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


def configuration(kind: str) -> Any:
    kinds: Any = CONFIG_MAPPING
    match kind:
        case "quickstart":
            quickstart = shape(character_tokenizer(), hidden=96, layers=4, heads=4)
            quickstart.vocab_size = 20  # of the test's batches
            return quickstart
        case "bidirectional":
            return kinds["llama"](**SMALL, is_causal=False)
        case "sliding":  # a window shorter than the rows
            return kinds["mistral"](**SMALL, sliding_window=4)
        case "lfm2":
            return kinds["lfm2"](**SMALL, full_attn_idxs=[1])
        case "opt":  # it derives its positions from the mask
            sizes = {key: value for key, value in SMALL.items() if not key.startswith(("intermediate", "num_key"))}
            return kinds["opt"](**sizes, ffn_dim=96, word_embed_proj_dim=64)
        case _:
            return kinds[kind](**SMALL)


def model(kind: str) -> Any:
    torch.manual_seed(7)
    build: Any = AutoModelForCausalLM.from_config
    return build(configuration(kind)).eval()


def saved(kind: str, directory: Path) -> Path:
    model(kind).save_pretrained(directory)
    return directory


@pytest.mark.parametrize("kind", ["quickstart", "llama", "qwen2"])
def test_without_a_mask_the_log_probabilities_are_the_same_to_the_last_bit(kind: str) -> None:
    policy, data = model(kind), batch(0, groups=2, lengths=(5, 60, 2, 40))
    masks: list[bool] = []

    def forward(**inputs: Tensor) -> Tensor:
        masks.append("attention_mask" in inputs)
        logits: Tensor = policy(use_cache=False, **inputs).logits
        return logits

    def gradients(mask_padding: bool) -> list[Tensor]:
        policy.zero_grad()
        which = np.arange(len(data.rewards))
        found = completion_logprobs(
            from_logits(forward, 0.7), data, which, torch.device("cpu"), packing=False, mask_padding=mask_padding
        )
        found.sum().backward()  # type: ignore[no-untyped-call]
        return [found.detach(), *(parameter.grad.clone() for parameter in policy.parameters())]

    masked, plain = gradients(True), gradients(False)
    assert masks == [True, False]
    assert torch.equal(masked[0], plain[0])
    assert float(masked[0].std()) > 0.01
    for left, right in zip(masked[1:], plain[1:], strict=True):
        assert torch.allclose(left, right, rtol=0, atol=1e-5 * max(1.0, float(left.abs().max())))


@pytest.mark.parametrize("kind", ["quickstart", "qwen2", "sliding", "lfm2", "opt", "mixtral", "bidirectional"])
def test_only_a_model_that_reads_padding_gets_a_mask(tmp_path: Path, kind: str) -> None:
    trainer = TorchTrainer(config(share_prompts=False), saved(kind, tmp_path))
    assert all(parameter.grad is None for parameter in trainer.model.parameters())
    masks: list[bool] = []
    trainer.model.register_forward_pre_hook(
        lambda _, __, inputs: masks.append(inputs.get("attention_mask") is not None), with_kwargs=True
    )
    trainer.train(batch(0), Step(0), lambda: False)
    assert masks == [kind == "bidirectional"]
