"""The prompt of a row as the tokenizer reads it: text, or messages with the tools that they may call."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

Encode = Callable[[Any], NDArray[np.int32]]
"""Function from a prompt, text or ``Conversation``, to its token ids. ``ValueError`` if the template refuses it."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages that the policy continues, and the descriptions of its tools, as a chat template takes them."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None

    def text(self) -> str:
        """Return the contents, one after another, for an engine without a tokenizer."""
        return "\n".join(str(message.get("content") or "") for message in self.messages)


def prompt_of(row: Mapping[str, Any]) -> str | Conversation | None:
    """Return the prompt of a row; None if it has none."""
    if isinstance(messages := row.get("messages"), list):
        return Conversation(cast(list[dict[str, Any]], messages), row.get("tools") or None)
    prompt = row.get("prompt")
    return prompt if isinstance(prompt, str) else None
