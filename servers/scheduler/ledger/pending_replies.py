"""Replies that wait for the commit of the state they report."""

from staleflow.net.endpoint import Call
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.wire.messages import Refusal, Reply

RETRY_MS = 500
"""Delay after which a client retries a ``BUSY`` refusal."""


class PendingReplies:
    """Replies that are not sent yet, in the order in which they were added."""

    def __init__(self) -> None:
        self._pending: list[tuple[Call, Reply]] = []

    def add(self, call: Call, reply: Reply) -> None:
        """Reply to ``call`` once all changes up to now are durable."""
        self._pending.append((call, reply))

    def refuse(self, call: Call, code: Code, detail: str, retry_for_ms: int = 0) -> None:
        """Refuse ``call`` after the next commit, in order with the other replies."""
        refusal = Refusal(code=code, detail=detail)
        if code is Code.BUSY:
            refusal = Refusal(code=code, detail=detail, retry_after_ms=RETRY_MS, retry_for_ms=retry_for_ms)
        self._pending.append((call, refusal))

    def release(self) -> None:
        """Send the replies after a successful commit."""
        pending, self._pending = self._pending, []
        for call, reply in pending:
            if not call.done:
                call.reply(reply)

    def refuse_all(self, why: str) -> None:
        """Refuse all calls with ``BUSY`` after a failed commit: their effects are undone, and the clients retry."""
        pending, self._pending = self._pending, []
        for call, _ in pending:
            if not call.done:
                call.refuse(Code.BUSY, why, RETRY_MS)
