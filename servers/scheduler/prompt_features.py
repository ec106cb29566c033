"""Requests to the trajectory servers for features of the next prompts: they store the rows, the queue only row numbers.

- An idle shard waits in a ``PromptFeatures`` call. The reply names rows of the current block of the prompt stream and
  the next one, one chunk at a time, so memory holds the features of upcoming prompts and never of a whole source.
- Every shard has every row, because the groups of one row are on other shards in other epochs. A request can go to any
  waiting shard.
- Rows requested from a shard that becomes silent are requested from another shard.
"""

from collections.abc import Callable

import numpy as np

from staleflow.net.endpoint import Call
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.wire.codec import ProtocolError
from staleflow.protocols.wire.messages import FEATURES, PromptFeatures, PromptFeaturesReply
from staleflow.protocols.wire.tensors import Array, arrays
from staleflow.servers.scheduler.long_polls import LongPolls
from staleflow.servers.scheduler.prompts.queue import PromptQueue
from staleflow.servers.scheduler.workers.registry import Registry

CHUNK = 256
"""Rows of one request: a shard computes their features in tens of milliseconds."""


class PromptFeatureRequests:
    """Waiting shards, and the rows that were requested from each shard."""

    def __init__(self, prompts: PromptQueue, registry: Registry, now_ms: Callable[[], int]) -> None:
        self._prompts = prompts
        self._registry = registry
        self._waiting = LongPolls[PromptFeatures](now_ms)
        self._requested: dict[str, list[int]] = {}
        """Rows requested from each shard, by peer."""
        self._to_request: list[int] = []
        """Rows to request next, including those of shards that became silent."""
        self._next_place = 0
        """First place of the prompt stream whose row has not been requested."""

    def receive(self, call: Call, body: PromptFeatures) -> None:
        """Store the features of a shard and keep its call for the next rows. Refuses peers that are not shards."""
        process = self._registry.get(call.peer)
        if process is None or process.role != "trajectories":
            call.refuse(Code.DENIED, f"{call.peer} is not a trajectory server of this run")
            return
        try:
            features = self._checked(call, body)
        except ProtocolError as error:
            call.refuse(error.code, error.detail)
            return
        self._requested.pop(call.peer, None)
        if features is not None:
            self._prompts.lengths.describe(body.rows, features)
        self._waiting.add(call, body)
        self.reply_waiting()

    def _checked(self, call: Call, body: PromptFeatures) -> Array | None:
        for row in body.rows:
            if not 0 <= row < self._prompts.rows:
                raise ProtocolError(Code.MALFORMED, f"row is {row}; it must be 0 to {self._prompts.rows - 1}")
        features = arrays(body.frames, call.frames).get("features")
        if not body.rows and features is None:
            return None
        wanted = (len(body.rows), FEATURES)
        if features is None or features.dtype != np.float16 or features.shape != wanted:
            raise ProtocolError(Code.MALFORMED, f"the features of {len(body.rows)} rows must be float16{list(wanted)}")
        if not np.isfinite(features).all():
            raise ProtocolError(Code.MALFORMED, "features holds a value that is not finite")
        return features

    def reply_waiting(self) -> None:
        """Reply to waiting shards while rows without features remain."""
        self._waiting.settle(self._request)

    def _request(self, call: Call, _: PromptFeatures) -> bool:
        if not (rows := self._next()):
            return False
        self._requested[call.peer] = rows
        call.reply(PromptFeaturesReply(rows=rows))
        return True

    def _next(self) -> list[int]:
        """Return up to ``CHUNK`` rows that have no features and are not requested yet; empty if none exist for now."""
        lengths = self._prompts.lengths
        while not self._to_request:
            upcoming = self._prompts.next_places()
            start = max(self._next_place, upcoming.start)
            places = range(start, min(start + CHUNK, upcoming.stop))
            if not lengths.learns or not places:
                return []
            self._next_place = places.stop
            requested = {row for rows in self._requested.values() for row in rows}
            rows = dict.fromkeys(self._prompts.rows_at(places))
            self._to_request = [row for row in rows if row not in requested and not lengths.described(row)]
        chunk, self._to_request = self._to_request[:CHUNK], self._to_request[CHUNK:]
        return chunk

    def remove_peer(self, peer: str) -> None:
        """Request the rows of a silent shard from another one. Other processes are ignored."""
        self._to_request += self._requested.pop(peer, [])
        self.reply_waiting()

    def answer_due(self, now_ms: int) -> None:
        """Reply without rows to the calls whose wait time has passed; their shards call again."""
        self._waiting.end(lambda call: call.reply(PromptFeaturesReply(rows=[])), now_ms)
