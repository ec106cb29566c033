"""An environment for held-out prompts that behaves as each row specifies. Child processes load this file by path."""

import asyncio
from collections.abc import Mapping
from typing import Any

from staleflow.clients.rollout.episodes.env_client import Client


class Asked:
    """Two turns of a plain completion, then the action that the row's ``then`` names."""

    async def rollout(self, client: Client, row: Mapping[str, Any]) -> Any:
        then, text, tokens = row["then"], str(row["prompt"]), list[int]()
        if then == "long":
            text *= 50
        for turn in range(2):
            reply = await client.completions.create(prompt=text, max_tokens=4 + turn)
            tokens += reply.choices[0].token_ids
            text += reply.choices[0].text + "=="
            if then == "raise":
                raise ValueError("no such planet")
            if then == "hang":
                await asyncio.sleep(3600)
        match then:
            case "tokens":
                return float(len(tokens))
            case "sum":
                return {"reward": float(sum(tokens)), "other": 1.0}
            case "other":
                return {"other": 1.0}
            case "nan":
                return float("nan")
            case "text":
                return text
            case _:
                return None
