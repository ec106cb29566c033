"""One question, one answer: the simplest environment, and what a reward function can not do.

It writes the messages itself, and it looks at the answer while the episode is still open.
"""

from collections.abc import Mapping
from typing import Any

from staleflow.clients.rollout.episodes.env_client import Client


class Question:
    """Rows need ``prompt`` and ``answer``."""

    def __init__(self, instruction: str = "") -> None:
        """``instruction``: a system message, when there is one."""
        self.before = [{"role": "system", "content": instruction}] if instruction else []

    async def rollout(self, client: Client, row: Mapping[str, Any]) -> float:
        """1 for exactly the answer, else 0."""
        messages = [*self.before, {"role": "user", "content": row["prompt"]}]
        reply = await client.chat.completions.create(messages=messages)
        return float(reply.choices[0].message.content.strip() == row["answer"])
