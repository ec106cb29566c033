# pyright: basic, reportMissingImports=false
"""``ChatTemplate`` for the tokenizer of a model directory. Adapter to transformers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from staleflow.clients.rollout.episodes.chat.template import Message
from staleflow.clients.tokens import open_tokenizer


class TokenizerChatTemplate:
    """A tokenizer with its chat template; without a template only plain completions work."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def prompt_ids(self, text: str) -> np.ndarray:
        return np.array(self._tokenizer(text)["input_ids"], np.int32)

    def token_ids(self, text: str) -> np.ndarray:
        return np.array(self._tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)

    def text(self, token_ids: np.ndarray) -> str:
        decoded: str = self._tokenizer.decode(token_ids.tolist(), skip_special_tokens=True)
        return decoded

    def render(self, messages: Sequence[Message]) -> str:
        if not self._tokenizer.chat_template:
            raise ValueError("the model's tokenizer has no chat template; plain completions work without one")
        try:
            rendered: str = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # a template is third-party code and may raise anything
            raise ValueError(f"the chat template refuses the messages: {error}") from error
        return rendered


def open_chat_template(directory: Path) -> TokenizerChatTemplate:
    """Open the tokenizer of a model directory."""
    return TokenizerChatTemplate(open_tokenizer(directory))
