"""Processors and connections in virtual time: work waits for the work before it.

Without costs they add no event: calls pass through at once, in the order in which they were made.
"""

from collections import deque
from collections.abc import Callable, Sequence
from heapq import heapreplace

from staleflow.configs.costs import SchedulerCosts, WireCosts
from staleflow.net.endpoint import Call, Peer
from staleflow.net.limits import TransportLimits
from staleflow.net.memory_transport import MemoryEndpoint, OnAnswer
from staleflow.protocols.wire.codec import Data
from staleflow.protocols.wire.messages import Operations, Reply, Report, Request
from staleflow.sim.timeline import Timeline

GIB = 1 << 30
MAX_DRAIN = TransportLimits().burst_messages


class Queue:
    """A server for one piece of work at a time, in order: a core, or one direction of a connection.

    With several ``servers``, the first free one takes the next piece.
    """

    def __init__(self, timeline: Timeline, servers: int = 1) -> None:
        self.busy_s = 0.0
        """Seconds of work so far, queued work included."""
        self._timeline = timeline
        self._free_s = [0.0] * servers
        """Time at which each server is free: a heap."""

    def add(self, work_s: float, done: Callable[[], object], *, more_s: float = 0.0) -> None:
        """Work for ``work_s`` once all earlier work is done, then call ``done`` after ``more_s``."""
        now_s, free_s = self._timeline.now_s, self._free_s[0]
        if free_s <= now_s and not work_s and not more_s:
            done()
            return
        ends_s = max(free_s, now_s) + work_s
        heapreplace(self._free_s, ends_s)
        self.busy_s += work_s
        self._timeline.at(ends_s + more_s, done)


class Drains:
    """The scheduler's core: it takes all waiting calls, handles them once their time is over, and then replies.

    The owner calls ``start`` when nothing else happens at this instant, and flushes the scheduler while ``handled``.
    """

    def __init__(self, timeline: Timeline, costs: SchedulerCosts | None, on_call: Callable[[Call], None]) -> None:
        self.handled = False
        """True if calls were handled since the owner last set this to False."""
        self.busy_s = 0.0
        """CPU seconds so far."""
        self._timeline = timeline
        self._costs = costs
        self._on_call = on_call
        self._waiting: deque[Call] = deque()
        self._pending = False
        """True while a drain, or a call of ``start`` after other work, is scheduled."""
        self._free_s = 0.0

    def receive(self, call: Call) -> None:
        """Queue a call; without costs, handle it."""
        if self._costs is None:
            self.handled = True
            self._on_call(call)
        else:
            self._waiting.append(call)

    def charge_second(self, connected: int, engines: int) -> None:
        """Charge the heartbeats and decisions of a second as one piece of work, before the calls that wait."""
        if self._costs is not None:
            self._occupy(self._costs.heartbeat_s * connected + self._costs.engine_s * engines)

    def start(self) -> bool:
        """Start a drain if calls wait and the core is free; return whether calls were handled at once."""
        costs = self._costs
        if costs is None or self._pending or not self._waiting:
            return False
        if self._free_s > self._timeline.now_s:
            self._pending = True
            self._timeline.at(self._free_s, self._finish, ())
            return False
        calls = [self._waiting.popleft() for _ in range(min(len(self._waiting), MAX_DRAIN))]
        drain_s = 0.0 if all(isinstance(call.body, Report) for call in calls) else costs.drain_s
        self._occupy(drain_s + sum(_work_s(costs, call) for call in calls))
        if self._free_s <= self._timeline.now_s:
            self._finish(calls)
            return True
        self._pending = True
        self._timeline.at(self._free_s, self._finish, calls)
        return False

    def _occupy(self, work_s: float) -> None:
        self._free_s = max(self._free_s, self._timeline.now_s) + work_s
        self.busy_s += work_s

    def _finish(self, calls: Sequence[Call]) -> None:
        self._pending = False
        for call in calls:
            if not call.done:  # the peer of a done one is gone
                self.handled = True
                self._on_call(call)


def _work_s(costs: SchedulerCosts, call: Call) -> float:
    """Return the CPU seconds of a call."""
    body = call.body
    message_s = costs.messages.get(type(body).__name__, costs.message_s)
    return message_s + (costs.operation_s * len(body.ops) if isinstance(body, Operations) else 0.0)


class WiredEndpoint(MemoryEndpoint):
    """A ``MemoryEndpoint`` behind one connection for each peer."""

    def __init__(self, on_call: Callable[[Call], None], timeline: Timeline, wire: WireCosts | None) -> None:
        super().__init__(on_call, timeline.soon)
        self._timeline = timeline
        self._wire = wire
        self._up: dict[str, Queue] = {}
        self._down: dict[str, Queue] = {}

    @property
    def busy_s(self) -> float:
        """Seconds of the connection that carried most, in one direction."""
        return max((queue.busy_s for queue in (*self._up.values(), *self._down.values())), default=0.0)

    def request(self, name: str, body: Request, on_answer: OnAnswer, frames: Sequence[Data] = ()) -> None:
        if self._wire is None:
            super().request(name, body, on_answer, frames)
        else:
            arrive = super().request
            self._send(self._up, name, frames, lambda: arrive(name, body, on_answer, frames))

    def answer(self, peer: Peer, id: int, body: Reply, frames: Sequence[Data]) -> None:
        if self._wire is None:
            super().answer(peer, id, body, frames)
        else:
            arrive = super().answer
            self._send(self._down, peer.name, frames, lambda: arrive(peer, id, body, frames))

    def _send(self, way: dict[str, Queue], name: str, frames: Sequence[Data], arrive: Callable[[], object]) -> None:
        assert self._wire is not None
        queue = way.get(name)
        if queue is None:
            queue = way[name] = Queue(self._timeline)
        nbytes = sum(memoryview(frame).nbytes for frame in frames)
        queue.add(self._wire.gib_s * nbytes / GIB, arrive, more_s=self._wire.latency_s)
