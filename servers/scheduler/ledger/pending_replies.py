"""Answers that wait for the commit of what they tell."""

from staleflow.net.endpoint import Call
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.wire.messages import Refusal, Reply

RETRY_MS = 500


class Answers:
    """Held answers, in the order in which they were given."""

    def __init__(self) -> None:
        self._held: list[tuple[Call, Reply]] = []

    def hold(self, call: Call, reply: Reply) -> None:
        """Answer ``call`` once everything up to now is durable."""
        self._held.append((call, reply))

    def refuse(self, call: Call, code: Code, detail: str, retry_for_ms: int = 0) -> None:
        """A normal no, in its place among the other answers."""
        refusal = Refusal(code=code, detail=detail)
        if code is Code.BUSY:
            refusal = Refusal(code=code, detail=detail, retry_after_ms=RETRY_MS, retry_for_ms=retry_for_ms)
        self._held.append((call, refusal))

    def release(self) -> None:
        """The commit is done: the answers leave."""
        held, self._held = self._held, []
        for call, reply in held:
            if not call.done:
                call.reply(reply)

    def take_back(self, why: str) -> None:
        """The commit failed: none of it happened, and everybody may ask again."""
        held, self._held = self._held, []
        for call, _ in held:
            if not call.done:
                call.refuse(Code.BUSY, why, RETRY_MS)
