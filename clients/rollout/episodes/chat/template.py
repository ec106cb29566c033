"""The tokenizer interface of a conversation, and an implementation for engines without a tokenizer."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Message = Mapping[str, Any]
"""One message of a chat as in the OpenAI calls: ``role``, ``content``, optionally ``tool_calls`` and others."""
Tool = Mapping[str, Any]
"""One tool as in the OpenAI calls: ``{"type": "function", "function": {"name": …, "parameters": …}}``."""
NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})


class ChatTemplate(Protocol):
    """Conversions between text, messages and the engine's tokens."""

    @property
    def source(self) -> str:
        """The template's own text, which shows the model family's format of tool calls; "" if there is none."""
        ...

    def prompt_ids(self, text: str) -> NDArray[np.int32]:
        """Tokenize a text that begins a sequence, including the tokenizer's leading special tokens."""
        ...

    def token_ids(self, text: str) -> NDArray[np.int32]:
        """Tokenize a text inside a sequence, without special tokens."""
        ...

    def text(self, token_ids: NDArray[np.int32], keep: Sequence[str] = ()) -> str:
        """Decode tokens without special tokens, except those in ``keep``."""
        ...

    def render(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), options: Mapping[str, Any] = NO_OPTIONS
    ) -> str:
        """Render the conversation and the start of the assistant's turn. ``ValueError`` gives the reason on failure.

        ``options`` are further variables of the template (``chat_template_kwargs``).
        """
        ...


class ByteChatTemplate:
    """Bytes as tokens and ``role: content`` lines as chat, for the simulated engine, which ends with a 0."""

    source = ""

    def prompt_ids(self, text: str) -> NDArray[np.int32]:
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    token_ids = prompt_ids

    def text(self, token_ids: NDArray[np.int32], keep: Sequence[str] = ()) -> str:
        return bytes(token_ids[token_ids > 0].astype(np.uint8)).decode("utf-8", "replace")

    def render(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), options: Mapping[str, Any] = NO_OPTIONS
    ) -> str:
        names = "".join(f"tool: {tool['function']['name']}\n" for tool in tools)
        lines = [f"{message['role']}: {message.get('content') or ''}\n" for message in messages]
        return "".join([names, *lines, "assistant: "])
