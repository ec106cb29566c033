# pyright: basic, reportMissingImports=false
"""``Speech`` by the tokenizer of a model directory. Adapter to transformers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from staleflow.clients.rollout.episodes.chat.template import Message
from staleflow.clients.tokens import open_tokenizer


class TokenizerSpeech:
    """A tokenizer with its chat template; without one, chats are refused and plain completions still work."""

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
        except Exception as error:  # a template is code of the model's authors, and raises what it likes
            raise ValueError(f"the chat template refuses the messages: {error}") from error
        return rendered


def open_speech(directory: Path) -> TokenizerSpeech:
    """Of a model directory."""
    return TokenizerSpeech(open_tokenizer(directory))
