"""Queue of the requests that wait for a free row of an engine."""

from collections import deque

from staleflow.clients.rollout.engines.base import Request


class RequestQueue:
    """First in, first out. An interrupted request moves to the front and stays marked until it gets a row."""

    def __init__(self) -> None:
        self._requests: deque[Request] = deque()
        self._cut: set[int] = set()

    def __len__(self) -> int:
        return len(self._requests)

    def append(self, request: Request) -> None:
        self._requests.append(request)

    def put_back(self, request: Request, *, cut: bool) -> None:
        """Put a request that lost its row at the front of the queue."""
        self._requests.appendleft(request)
        if cut:
            self._cut.add(request.id)

    def first(self) -> Request:
        """Return the next request without removing it. Raise ``IndexError`` if the queue is empty."""
        return self._requests[0]

    def take(self) -> tuple[Request, bool]:
        """Remove the next request; also return whether it was interrupted. Raise ``IndexError`` if empty."""
        request = self._requests.popleft()
        cut = request.id in self._cut
        self._cut.discard(request.id)
        return request, cut

    def interrupt(self, request: int) -> None:
        """Move a request to the front, to finish after its first token. Requests outside the queue are ignored."""
        if (requested := self.withdraw(request)) is not None:
            self.put_back(requested, cut=True)

    def withdraw(self, request: int) -> Request | None:
        """Remove a request from the queue and return it; None if it is not queued."""
        for place, waiting in enumerate(self._requests):
            if waiting.id == request:
                del self._requests[place]
                self._cut.discard(request)
                return waiting
        return None
