"""Limits of the trained model: stored when a trainer joins and sent to the waiting shards.

They are stored because leases outlive a restart of the scheduler: a push may arrive before the trainer has rejoined.
"""

import msgspec

from staleflow.net.endpoint import Call
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.wire.messages import GetModelLimits, ModelLimits
from staleflow.servers.scheduler.ledger.interpreter import Interpreter
from staleflow.servers.scheduler.ledger.pending_replies import PendingReplies

MAX_WAIT_MS = 60_000
_MODEL = b"model"


class CurrentModelLimits:
    """Model limits of the trainer that joined last, and the shards that wait for a change."""

    def __init__(self, interpreter: Interpreter, replies: PendingReplies) -> None:
        self._interpreter = interpreter
        self._replies = replies
        self._waiting: list[tuple[Call, GetModelLimits, int]] = []
        """Open calls with the limits that the shard has, and the deadline in milliseconds."""
        with interpreter.store.read() as txn:
            raw = txn.get("meta", _MODEL)
        self._model = None if raw is None else msgspec.msgpack.decode(raw, type=ModelLimits)

    def update(self, model: ModelLimits) -> None:
        """Store the limits of a trainer that has joined, and send them to the waiting shards."""
        self._model = model
        self._interpreter.with_commit(lambda txn: txn.put("meta", _MODEL, msgspec.msgpack.encode(model)))
        waiting, self._waiting = self._waiting, []
        for call, body, due_ms in waiting:
            self._reply_or_wait(call, body, due_ms)

    def get(self, call: Call, body: GetModelLimits) -> None:
        """Reply with limits that differ from those of the shard, or keep the call until such limits exist."""
        self._reply_or_wait(call, body, self._interpreter.clock.now_ms() + min(body.wait_ms, MAX_WAIT_MS))

    def _reply_or_wait(self, call: Call, body: GetModelLimits, due_ms: int) -> None:
        if self._model is not None and self._model != body.known:
            self._replies.add(call, self._model)
        else:
            self._waiting.append((call, body, due_ms))

    def answer_due(self, now_ms: int) -> None:
        """Refuse the calls whose wait time has passed; their clients retry."""
        late = [call for call, _, due_ms in self._waiting if due_ms <= now_ms]
        self._waiting = [waiting for waiting in self._waiting if waiting[2] > now_ms]
        for call in late:
            if not call.done:
                call.refuse(Code.BUSY, "no trainer has joined with another model", retry_after_ms=1)
