"""Calls that wait for an event: each gets its reply when the event comes, or when its wait time has passed."""

from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar

from staleflow.net.endpoint import Call

MAX_WAIT_MS = 60_000


class Waits(Protocol):
    """A request that names its wait time."""

    @property
    def wait_ms(self) -> int: ...


Body = TypeVar("Body", bound=Waits)


class LongPolls(Generic[Body]):
    """Open calls in the order of their arrival. A call that needs no reply any more is discarded on the way."""

    def __init__(self, now_ms: Callable[[], int]) -> None:
        self._now_ms = now_ms
        self._open: list[tuple[int, Call, Body]] = []
        """Each with the end of its wait time in milliseconds."""

    def __iter__(self) -> Iterator[Body]:
        return iter([body for _, _, body in self._open])

    def __len__(self) -> int:
        return len(self._open)

    def add(self, call: Call, body: Body) -> None:
        """Keep a call for ``body.wait_ms``, at most ``MAX_WAIT_MS``."""
        self._open.append((self._now_ms() + min(body.wait_ms, MAX_WAIT_MS), call, body))

    def settle(self, reply: Callable[[Call, Body], bool]) -> None:
        """Offer every call to ``reply``, which returns False if the call has to wait on."""
        self._open = [one for one in self._open if not one[1].done and not reply(one[1], one[2])]

    def end(self, reply: Callable[[Call], None], now_ms: int | None = None) -> None:
        """Reply to the calls whose wait time has passed at ``now_ms``; without it, to all."""
        open_calls, self._open = self._open, []
        for due_ms, call, body in open_calls:
            if now_ms is not None and due_ms > now_ms:
                self._open.append((due_ms, call, body))
            elif not call.done:
                reply(call)
