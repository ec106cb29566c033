"""A tool between question and answer: the model writes an expression, the calculator its value, the model the answer.

The environment writes the question and the value, the model the other messages. Only the model's tokens are trained;
the value that the tool wrote is context and masked.
"""

import re
from collections.abc import Mapping
from typing import Any

from staleflow.clients.rollout.episodes.env_client import Client, EpisodeOver

EXPRESSION = re.compile(r"(\d{1,9})([+-])(\d{1,9})")


class Calculator:
    """Rows need ``prompt`` (the question) and ``answer``."""

    def __init__(self, max_tokens: int | None = None) -> None:
        """``max_tokens``: limit of one turn; None means ``rollout.max_new_tokens``."""
        self.limits = {"max_tokens": max_tokens}

    async def rollout(self, client: Client, row: Mapping[str, Any]) -> dict[str, float]:
        """``reward``: 1 for exactly the answer; ``calculated``: 1 if the tool could parse the expression."""
        messages: list[Any] = [{"role": "user", "content": row["prompt"]}]
        called = await client.chat.completions.create(messages=messages, **self.limits)
        value = calculate(called.choices[0].message.content)
        messages += [called.choices[0].message, {"role": "tool", "content": value}]
        try:
            answered = await client.chat.completions.create(messages=messages, **self.limits)
        except EpisodeOver:  # interrupted: score the messages so far
            return {"reward": 0.0, "calculated": float(value != "?")}
        right = answered.choices[0].message.content.strip() == row["answer"]
        return {"reward": float(right), "calculated": float(value != "?")}


def calculate(expression: str) -> str:
    """Return the value of ``a+b`` or ``a-b``; ``?`` for anything else."""
    result = EXPRESSION.fullmatch(expression.strip())
    if result is None:
        return "?"
    left, right = int(result[1]), int(result[3])
    return str(left + right if result[2] == "+" else left - right)
