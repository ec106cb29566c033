# pyright: basic, reportMissingImports=false
"""Decoding of completions with the tokenizer of the model directory. Adapter to tokenizers, else transformers.

A reward worker needs no model: if there is a ``tokenizer.json``, it starts without torch, which saves seconds.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from staleflow.configs.errors import ConfigError
from staleflow.configs.loading.presence import check_model_dir

Decode = Callable[[list[NDArray[np.int32]]], list[str]]
"""Function from the token ids of some completions to their texts, in order."""


def tokenizer_decoder(model: Path, *, special: bool = False) -> Decode:
    """Return a decoder with the tokenizer in ``model``; ``special``: keep special tokens.

    Raise ``ConfigError`` if there is no tokenizer.
    """
    check_model_dir(model, "model directory")
    decode_batch = _fast(model / "tokenizer.json") if (model / "tokenizer.json").is_file() else _any(model)

    def decode(completions: list[NDArray[np.int32]]) -> list[str]:
        return decode_batch([ids.tolist() for ids in completions], skip_special_tokens=not special)

    return decode


def _fast(file: Path) -> Callable[..., list[str]]:
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(file)).decode_batch
    except Exception as error:  # the library raises plain Exception for an unreadable file
        raise ConfigError("tokenizer", str(file), f"it cannot be read: {error}") from error


def _any(model: Path) -> Callable[..., list[str]]:
    from staleflow.clients.tokens import open_tokenizer

    decode_batch: Callable[..., list[str]] = open_tokenizer(model).batch_decode
    return decode_batch


def ids_as_text(completions: list[NDArray[np.int32]]) -> list[str]:
    """Decode for the simulated engine, which has no tokenizer: the ids, separated by spaces."""
    return [" ".join(map(str, ids.tolist())) for ids in completions]
