"""An environment that rejects some of its rows."""

from collections.abc import Mapping
from typing import Any

from staleflow.clients.rollout.episodes.env_client import Client
from staleflow.examples.environments.calculator import Calculator


class Moody(Calculator):
    async def rollout(self, client: Client, row: Mapping[str, Any]) -> dict[str, float]:
        if row["answer"].endswith("7"):
            raise RuntimeError("not today")
        return await super().rollout(client, row)
