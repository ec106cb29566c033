"""What a conversation needs of a tokenizer, and one for engines that have none. Adapters: ``chat_tokens``."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Message = Mapping[str, Any]
"""One message of a chat, as in the OpenAI calls: ``role``, ``content``, perhaps ``tool_calls`` and the like."""


class Speech(Protocol):
    """Between text and the engine's tokens."""

    def prompt_ids(self, text: str) -> NDArray[np.int32]:
        """Of a text that begins a sequence, with what the tokenizer puts in front."""
        ...

    def token_ids(self, text: str) -> NDArray[np.int32]:
        """Of a text inside a sequence: nothing is added."""
        ...

    def text(self, token_ids: NDArray[np.int32]) -> str:
        """Without special tokens."""
        ...

    def render(self, messages: Sequence[Message]) -> str:
        """The whole conversation by the chat template, the assistant's next turn begun. ``ValueError`` says why not."""
        ...


class ByteSpeech:
    """Tokens are bytes, a chat is ``role: content`` lines: for the simulated engine, which ends with a 0."""

    def prompt_ids(self, text: str) -> NDArray[np.int32]:
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    token_ids = prompt_ids

    def text(self, token_ids: NDArray[np.int32]) -> str:
        return bytes(token_ids[token_ids > 0].astype(np.uint8)).decode("utf-8", "replace")

    def render(self, messages: Sequence[Message]) -> str:
        lines = [f"{message['role']}: {message.get('content') or ''}\n" for message in messages]
        return "".join([*lines, "assistant: "])
