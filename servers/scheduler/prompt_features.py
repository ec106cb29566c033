"""Features of the prompts that come next, from the trajectory servers: they have the rows, the deck only numbers.

- An idle shard waits here (``PromptFeatures``). The reply names rows of the block that is being dealt and of the next
  one, a chunk at a time, so memory holds what is about to be dealt and never a whole source.
- Every shard has every row, because the groups of one row are on other shards in other epochs. Any waiting shard will
  do.
- What a shard was asked for when it fell silent is asked of the next.
"""

from collections import deque

import numpy as np

from staleflow.net.endpoint import Call
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.wire.codec import ProtocolError
from staleflow.protocols.wire.messages import FEATURES, PromptFeatures, PromptFeaturesReply
from staleflow.protocols.wire.tensors import Array, arrays
from staleflow.servers.scheduler.prompts.queue import Deck
from staleflow.servers.scheduler.workers.registry import Registry

CHUNK = 256
"""Rows of one question: a shard describes them in some ten milliseconds."""
MAX_WAIT_MS = 60_000


class Describing:
    """Shards that wait, and what they were asked for."""

    def __init__(self, deck: Deck, registry: Registry) -> None:
        self._deck = deck
        self._registry = registry
        self._waiting: deque[tuple[Call, int]] = deque()
        """Calls, and when they are answered at latest."""
        self._asked: dict[str, list[int]] = {}
        """Rows that a shard was asked for, by peer."""
        self._again: list[int] = []
        """Rows whose shard fell silent."""
        self._place = 0
        """First place of the prompt stream that nobody was asked for."""

    def described(self, call: Call, body: PromptFeatures, now_ms: int) -> None:
        """Take features in; the call waits for the next rows. Anybody but a shard is refused."""
        process = self._registry.get(call.peer)
        if process is None or process.role != "trajectories":
            call.refuse(Code.DENIED, f"{call.peer} is no trajectory server of this run")
            return
        try:
            features = self._checked(call, body)
        except ProtocolError as error:
            call.refuse(error.code, error.detail)
            return
        self._asked.pop(call.peer, None)
        if features is not None:
            self._deck.lengths.describe(body.rows, features)
        self._waiting.append((call, now_ms + min(body.wait_ms, MAX_WAIT_MS)))
        self.ask()

    def _checked(self, call: Call, body: PromptFeatures) -> Array | None:
        for row in body.rows:
            if not 0 <= row < self._deck.rows:
                raise ProtocolError(Code.MALFORMED, f"row {row} is none of {self._deck.rows}")
        features = arrays(body.frames, call.frames).get("features")
        if not body.rows and features is None:
            return None
        wanted = (len(body.rows), FEATURES)
        if features is None or features.dtype != np.float16 or features.shape != wanted:
            raise ProtocolError(Code.MALFORMED, f"the features of {len(body.rows)} rows must be float16{list(wanted)}")
        if not np.isfinite(features).all():
            raise ProtocolError(Code.MALFORMED, "features holds a value that is not finite")
        return features

    def ask(self) -> None:
        """Answer those that wait, as far as there are rows to describe."""
        while self._waiting and (rows := self._next()):
            call, _ = self._waiting.popleft()
            if call.done:
                self._again += rows
            else:
                self._asked[call.peer] = rows
                call.reply(PromptFeaturesReply(rows=rows))

    def _next(self) -> list[int]:
        """Rows that nobody described and nobody was asked for; empty when there are none for now."""
        lengths = self._deck.lengths
        while not self._again:
            soon = self._deck.soon()
            start = max(self._place, soon.start)
            places = range(start, min(start + CHUNK, soon.stop))
            if not lengths.learns or not places:
                return []
            self._place = places.stop
            asked = {row for rows in self._asked.values() for row in rows}
            rows = dict.fromkeys(self._deck.rows_at(places))
            self._again = [row for row in rows if row not in asked and not lengths.described(row)]
        chunk, self._again = self._again[:CHUNK], self._again[CHUNK:]
        return chunk

    def lost(self, peer: str) -> None:
        """Nothing is heard of a process any more."""
        self._again += self._asked.pop(peer, [])
        self.ask()

    def answer_due(self, now_ms: int) -> None:
        """Answer the calls that have waited long enough."""
        late = [call for call, due_ms in self._waiting if due_ms <= now_ms]
        self._waiting = deque((call, due_ms) for call, due_ms in self._waiting if due_ms > now_ms)
        for call in late:
            if not call.done:
                call.reply(PromptFeaturesReply(rows=[]))
