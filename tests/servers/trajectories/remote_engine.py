"""An engine of another host that pushes large groups in frames through the shipped class."""

import asyncio
from collections import defaultdict

from staleflow.clients.rollout.pushes import Pusher
from staleflow.net.client import Client
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.wire.messages import Assign, Result
from tests.servers.running import Rollout, payload

TOKENS = 5_000
"""Tokens of a sample; a group is about 0.1 MB."""


class Engine:
    """Push groups of one shard until ``close``."""

    def __init__(self, rollout: Rollout, shard: Client) -> None:
        """``shard``: a separate connection for this engine."""
        self.codes: defaultdict[int, list[Code | None]] = defaultdict(list)
        """All results, by group."""
        self.pusher = Pusher(shard, rollout.worker, self._settled)
        self._held = rollout.held
        self._running = asyncio.create_task(self.pusher.run())

    def _settled(self, assign: Assign, result: Result) -> None:
        self.codes[assign.group].append(result.code)
        self._held.pop(assign.lease, None)

    def put(self, *assigns: Assign, tokens: int = TOKENS) -> None:
        for assign in assigns:
            self.pusher.put(assign, payload(assign.version, seed=assign.group, tokens=tokens))

    async def idle(self, within_s: float = 30.0) -> None:
        """Wait until no push is pending."""
        async with asyncio.timeout(within_s):
            await self.pusher.idle.wait()

    def close(self) -> None:
        self._running.cancel()
