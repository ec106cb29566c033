"""Limits of the trained model: stored when a trainer joins and sent to the waiting shards.

They are stored because leases outlive a restart of the scheduler: a push may arrive before the trainer has rejoined.
"""

import msgspec

from staleflow.net.endpoint import Call
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.wire.messages import GetModelLimits, ModelLimits
from staleflow.servers.scheduler.ledger.interpreter import Interpreter
from staleflow.servers.scheduler.ledger.pending_replies import PendingReplies
from staleflow.servers.scheduler.long_polls import LongPolls

_MODEL = b"model"


class CurrentModelLimits:
    """Model limits of the trainer that joined last, and the shards that wait for a change."""

    def __init__(self, interpreter: Interpreter, replies: PendingReplies) -> None:
        self._interpreter = interpreter
        self._replies = replies
        self._waiting = LongPolls[GetModelLimits](interpreter.clock.now_ms)
        """Calls of shards, each with the limits that the shard has."""
        with interpreter.store.read() as txn:
            raw = txn.get("meta", _MODEL)
        self._model = None if raw is None else msgspec.msgpack.decode(raw, type=ModelLimits)

    def update(self, model: ModelLimits) -> None:
        """Store the limits of a trainer that has joined, and send them to the waiting shards."""
        self._model = model
        self._interpreter.with_commit(lambda txn: txn.put("meta", _MODEL, msgspec.msgpack.encode(model)))
        self._waiting.settle(self._reply)

    def get(self, call: Call, body: GetModelLimits) -> None:
        """Reply with limits that differ from those of the shard, or keep the call until such limits exist."""
        if not self._reply(call, body):
            self._waiting.add(call, body)

    def _reply(self, call: Call, body: GetModelLimits) -> bool:
        if self._model is None or self._model == body.known:
            return False
        self._replies.add(call, self._model)
        return True

    def answer_due(self, now_ms: int) -> None:
        """Refuse the calls whose wait time has passed; their clients retry."""
        no_change = "no trainer has joined with another model"
        self._waiting.end(lambda call: call.refuse(Code.BUSY, no_change, retry_after_ms=1), now_ms)
