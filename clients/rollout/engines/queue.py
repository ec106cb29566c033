"""Requests that wait for a free row of an engine."""

from collections import deque

from staleflow.clients.rollout.engines.base import Request


class Waiting:
    """First come, first served; an interrupted request is next, and its cut is remembered until it has a row."""

    def __init__(self) -> None:
        self._requests: deque[Request] = deque()
        self._cut: set[int] = set()

    def __len__(self) -> int:
        return len(self._requests)

    def append(self, request: Request) -> None:
        self._requests.append(request)

    def put_back(self, request: Request, *, cut: bool) -> None:
        """Make it the next one: it had a row, and loses it."""
        self._requests.appendleft(request)
        if cut:
            self._cut.add(request.id)

    def first(self) -> Request:
        """The next one, which stays. ``IndexError`` when none waits."""
        return self._requests[0]

    def take(self) -> tuple[Request, bool]:
        """The next one, and whether it was interrupted while it waited. ``IndexError`` when none waits."""
        request = self._requests.popleft()
        cut = request.id in self._cut
        self._cut.discard(request.id)
        return request, cut

    def interrupt(self, request: int) -> None:
        """It is next, and over after its first token. Nothing, when it does not wait."""
        if (found := self.withdraw(request)) is not None:
            self.put_back(found, cut=True)

    def withdraw(self, request: int) -> Request | None:
        """Take it out of the queue; None when it does not wait."""
        for place, waiting in enumerate(self._requests):
            if waiting.id == request:
                del self._requests[place]
                self._cut.discard(request)
                return waiting
        return None
