# pyright: basic, reportMissingImports=false
"""Encoding of prompts with the tokenizer of a model directory, shared by rollout and evaluation."""

from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from staleflow.clients.prompts import Conversation, Encode
from staleflow.configs.errors import ConfigError
from staleflow.configs.loading.presence import check_model_dir


def open_tokenizer(directory: Path) -> Any:
    """Open the tokenizer of a model directory. Raise ``ConfigError`` if there is none that can be read."""
    check_model_dir(directory, "model directory")
    try:
        return AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except Exception as error:  # the library raises arbitrary exceptions for a broken file
        raise ConfigError("tokenizer", str(directory), f"it cannot be read: {error}") from error


def encoder(tokenizer: Any, *, chat_template: bool, system: str = "") -> Encode:
    """Return a function from a prompt to int32 ids; ``chat_template``: text as one user message, messages as they are,
    followed by the start of the assistant's turn. ``system``: message of prompts without one of their own."""
    if not chat_template:
        return lambda prompt: np.array(tokenizer(prompt)["input_ids"], np.int32)
    if not tokenizer.chat_template:
        raise ConfigError("prompts.chat_template", True, "the tokenizer of the model has no chat template")

    def encode(prompt: str | Conversation) -> np.ndarray:
        given = prompt if isinstance(prompt, Conversation) else Conversation([{"role": "user", "content": prompt}])
        own = given.messages[0]["role"] == "system" or not system
        messages = given.messages if own else [{"role": "system", "content": system}, *given.messages]
        try:
            text = tokenizer.apply_chat_template(
                messages, tools=given.tools, tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # a template is third-party code and may raise anything
            raise ValueError(f"the chat template refuses its messages: {error}") from error
        return np.array(tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)

    return encode


def check_vocabulary(tokenizer: Any, model: Any) -> None:
    """Raise ``ConfigError`` if the tokenizer has ids for which the model has no embedding."""
    ids, rows = max(tokenizer.get_vocab().values(), default=0) + 1, model.config.get_text_config().vocab_size
    if ids > rows:
        raise ConfigError(
            "tokenizer", f"{ids} tokens", f"the model's vocabulary has {rows}: they do not belong together"
        )


def check_same_tokens(key: str, directory: Path, policy: Path) -> None:
    """Raise ``ConfigError`` unless the tokenizer in ``directory`` has every token of the policy under the same id."""
    own, theirs = (open_tokenizer(place).get_vocab() for place in (policy, directory))
    differ = sorted((number, token) for token, number in own.items() if theirs.get(token) != number)
    if differ:
        number, token = differ[0]
        actual = f"{theirs[token]}" if token in theirs else "missing"
        allowed = f"its tokenizer is not the policy's, of which {len(differ)} tokens differ: {token!r} is {actual}"
        raise ConfigError(key, str(directory), f"{allowed}, not {number}")


def stop_ids(model: Any, tokenizer: Any) -> list[int]:
    """Return the tokens that end a completion: those of the tokenizer and of the model's generation config."""
    ids = {tokenizer.eos_token_id}
    generation = getattr(model, "generation_config", None)
    eos = getattr(generation, "eos_token_id", None)
    ids.update(eos if isinstance(eos, list) else [eos])
    return sorted(token for token in ids if token is not None)
