# pyright: basic, reportMissingImports=false
"""Fixtures of the trainer: a model small enough for every test."""

from pathlib import Path
from typing import Any

import pytest

VOCABULARY = 20
"""Ten digits, eight signs, padding; token 19 ends a completion."""


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two random layers of width 32, and a tokenizer of single characters."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    directory = tmp_path_factory.mktemp("model")
    torch.manual_seed(7)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        eos_token_id=19,
        pad_token_id=18,
        bos_token_id=None,
    )
    model: Any = Qwen3ForCausalLM(config)  # type: ignore[no-untyped-call]
    model.save_pretrained(directory)
    vocabulary = {character: index for index, character in enumerate("0123456789+-*/= ()")} | {"<pad>": 18, "<eos>": 19}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    fast: Any = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")  # type: ignore[no-untyped-call]
    fast.save_pretrained(directory)
    return directory
