# pyright: basic, reportMissingImports=false
"""``ChatTemplate`` for the tokenizer of a model directory. Adapter to transformers."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from staleflow.clients.rollout.episodes.chat.template import NO_OPTIONS, Message, Tool
from staleflow.clients.tokens import open_tokenizer


class TokenizerChatTemplate:
    """A tokenizer with its chat template; without a template only plain completions work."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        names = tokenizer.get_vocab()
        special = {token: names[token] for token in tokenizer.all_special_tokens if token in names}
        special |= {str(token): number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._special = special

    @property
    def source(self) -> str:
        """The template; several named ones (Hermes has one for tools) are joined."""
        template = self._tokenizer.chat_template or ""
        return "\n".join(template.values()) if isinstance(template, dict) else template

    def prompt_ids(self, text: str) -> np.ndarray:
        return np.array(self._tokenizer(text)["input_ids"], np.int32)

    def token_ids(self, text: str) -> np.ndarray:
        return np.array(self._tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)

    def text(self, token_ids: np.ndarray, keep: Sequence[str] = ()) -> str:
        hidden = {number for token, number in self._special.items() if token not in keep}
        decoded: str = self._tokenizer.decode([token for token in token_ids.tolist() if token not in hidden])
        return decoded

    def render(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), options: Mapping[str, Any] = NO_OPTIONS
    ) -> str:
        if not self._tokenizer.chat_template:
            raise ValueError("the model's tokenizer has no chat template; plain completions work without one")
        try:
            rendered: str = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=[dict(tool) for tool in tools] or None,
                **{**options, "tokenize": False, "add_generation_prompt": True},
            )
        except Exception as error:  # a template is third-party code and may raise anything
            raise ValueError(f"the chat template refuses the messages: {error}") from error
        return rendered


def open_chat_template(directory: Path) -> TokenizerChatTemplate:
    """Open the tokenizer of a model directory."""
    return TokenizerChatTemplate(open_tokenizer(directory))
