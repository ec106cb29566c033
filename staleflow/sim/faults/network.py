"""A simulated network: every message takes time, and faults lose, duplicate, delay and reorder messages.

One client's connection to one server is a ``Wire``. Messages on it keep their order except where a fault reorders them.
A wire is lost when either side dies or a fault disconnects them. The client's side then reconnects by itself and sends
its unsent messages; messages in flight are lost.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from staleflow.configs.errors import ConfigError
from staleflow.net.limits import TransportLimits
from staleflow.net.transport import Link, OnMessage
from staleflow.protocols.wire.codec import Data
from staleflow.sim.virtual import Conductor, Process

GRAIN_S: Final = 0.001
"""Messages arrive at multiples of this, so that some share a drain as on a real network."""
RECONNECT_S: Final = 0.1
DRAINED_SHARE: Final = 0.8
"""Share of connections with a dead end whose messages in flight still arrive."""
MAX_OVERTAKEN_S: Final = 1.0
"""Maximum extra delay of a message that others overtake."""

Parts = tuple[bytes, ...]


@dataclass(slots=True)
class Weather:
    """Current conditions of the network."""

    loss: float = 0.0
    double: float = 0.0
    reorder: float = 0.0
    """Shares of messages that are lost, duplicated, or overtaken."""
    delay_s: float = 0.001
    """Mean transmission time of a message."""
    slow: dict[str, float] = field(default_factory=dict[str, float])
    """Process name -> extra seconds of each of its messages."""
    cut: set[tuple[str, str]] = field(default_factory=set[tuple[str, str]])
    """(from, to) pairs that cannot reach each other. One direction each."""


class Wire:
    """One client's connection to one server, as long as it lasts."""

    __slots__ = ("clear_s", "client", "drains", "open", "server")

    def __init__(self, client: "ClientLink", server: "ServerLink") -> None:
        self.client = client
        self.server = server
        self.open = True
        self.drains = False
        """True if it is closed, but messages in flight still arrive."""
        self.clear_s = [0.0, 0.0]
        """Arrival time of the last message to the server, and to the client."""


class Inbox:
    """Messages that have arrived at one side and are not handled yet."""

    def __init__(
        self,
        process: Process,
        limits: TransportLimits,
        num_heads: int,
        on_message: OnMessage,
        on_drained: Callable[[], None] | None,
    ) -> None:
        self._process = process
        self.limits = limits
        self._num_heads = num_heads
        self._on_message = on_message
        self._on_drained = on_drained
        self._waiting: list[Parts] = []
        self._scheduled = False
        self.open = False

    def start(self) -> None:
        self.open = True
        self._drain_soon()

    def put(self, parts: Parts) -> None:
        """Add a message to the process's memory; the process handles it in its next turn."""
        self._waiting.append(parts)
        self._drain_soon()

    def _drain_soon(self) -> None:
        if self.open and self._waiting and not self._scheduled:
            self._scheduled = True
            self._process.loop.call_soon(self._drain)

    def _drain(self) -> None:
        self._scheduled = False
        limits, num_heads, burst = self.limits, self._num_heads, self.limits.burst_messages
        now, self._waiting = self._waiting[:burst], self._waiting[burst:]
        for parts in now:
            if not self.open:
                return
            frames = [memoryview(part) for part in parts[num_heads:]]
            size = sum(map(len, parts[num_heads - 1 :]))
            oversize = size > limits.max_message_bytes or len(frames) > limits.max_frames
            self._on_message(list(parts[:num_heads]), frames, oversize)
        if now and self._on_drained is not None and self.open:
            self._on_drained()
        self._drain_soon()


class ServerLink:
    """The bound side."""

    def __init__(self, network: "Network", process: Process, address: str, inbox: Inbox) -> None:
        self.network = network
        self.process = process
        self.address = address
        self.inbox = inbox
        self.wires: dict[bytes, Wire] = {}

    def start(self) -> None:
        self.inbox.start()

    def send(self, parts: Sequence[Data]) -> bool:
        wire = self.wires.get(bytes(parts[0]))
        if wire is None or not wire.open:
            return False
        self.network.carry(wire, 1, tuple(map(bytes, parts[1:])))
        return True

    def close(self, linger_ms: int | None = None) -> None:
        if self.process.alive:
            self.inbox.open = False
            self.network.unbind(self)


class ClientLink:
    """The connecting side."""

    def __init__(self, network: "Network", process: Process, address: str, route: bytes, inbox: Inbox) -> None:
        self.network = network
        self.process = process
        self.address = address
        self.route = route
        self.inbox = inbox
        self.wire: Wire | None = None
        self._unsent: list[Parts] = []
        self._queue = inbox.limits.send_queue
        self.closed = False

    def start(self) -> None:
        self.inbox.start()
        self.network.connect(self)

    def send(self, parts: Sequence[Data]) -> bool:
        copied = tuple(map(bytes, parts))
        if self.wire is not None and self.wire.open:
            self.network.carry(self.wire, 0, copied)
        elif len(self._unsent) < self._queue:
            self._unsent.append(copied)
        else:
            return False
        return True

    def connected(self, wire: Wire) -> None:
        self.wire = wire
        unsent, self._unsent = self._unsent, []
        for parts in unsent:
            self.network.carry(wire, 0, parts)

    def close(self, linger_ms: int | None = None) -> None:
        if self.process.alive and not self.closed:
            self.closed = True
            self.inbox.open = False
            self.network.close_link(self, at_once=linger_ms == 0)


class Network:
    """All wires. ``weather`` may be changed at any time and applies to messages sent afterwards."""

    def __init__(self, conductor: Conductor, rng: random.Random) -> None:
        self.weather = Weather()
        self.counts = {"carried": 0, "lost": 0, "doubled": 0, "reordered": 0, "cut": 0, "disconnected": 0}
        self._conductor = conductor
        self._rng = rng
        self._bound: dict[str, ServerLink] = {}

    def transport(self, process: Process) -> "SimTransport":
        """Return the network as seen by one process."""
        return SimTransport(self, process)

    # --- connections ---------------------------------------------------------------------------------------------

    def bind(self, link: ServerLink) -> None:
        present = self._bound.get(link.address)
        if present is not None and present.process.alive:
            raise ConfigError("bind", link.address, "it is in use; it must be free")
        self._bound[link.address] = link
        link.process.on_end.append(lambda: self.unbind(link))

    def unbind(self, link: ServerLink) -> None:
        """Remove a server; connected clients notice, unless they are cut off."""
        if self._bound.get(link.address) is link:
            del self._bound[link.address]
        for wire in list(link.wires.values()):
            self._lose(wire, drains=self._rng.random() < DRAINED_SHARE)
        link.wires.clear()

    def connect(self, link: ClientLink) -> None:
        """Connect now, or retry later if no server is bound."""
        if link.closed or not link.process.alive:
            return
        server = self._bound.get(link.address)
        if server is None or link.process.stopped or self._apart(link.process.name, server.process.name):
            self._conductor.after(RECONNECT_S, self.connect, link)
            return
        wire = Wire(link, server)
        older = server.wires.get(link.route)
        if older is not None:
            older.open = False
        server.wires[link.route] = wire
        link.process.on_end.append(lambda: self._lose(wire, drains=self._rng.random() < DRAINED_SHARE))
        link.connected(wire)

    def _apart(self, name: str, other: str) -> bool:
        """Return whether two processes cannot connect: a connection needs both directions."""
        return not self.weather.cut.isdisjoint(((name, other), (other, name)))

    def close_link(self, link: ClientLink, *, at_once: bool) -> None:
        """Close a client's link. Its sent messages still arrive, unless ``at_once``."""
        if link.wire is not None:
            delay_s = 0.0 if at_once else max(link.wire.clear_s[0] - self._conductor.now_s, 0.0)
            self._conductor.after(delay_s, self._lose, link.wire)

    def disconnect(self, name: str) -> None:
        """Break every connection of a process, once."""
        for server in list(self._bound.values()):
            for wire in list(server.wires.values()):
                if name in (server.process.name, wire.client.process.name):
                    self.counts["disconnected"] += 1
                    self._lose(wire)

    def _lose(self, wire: Wire, *, drains: bool = False) -> None:
        if not wire.open:
            return
        wire.open, wire.drains = False, drains
        if wire.server.wires.get(wire.client.route) is wire:
            del wire.server.wires[wire.client.route]
        self._conductor.after(RECONNECT_S * (0.5 + self._rng.random()), self.connect, wire.client)

    # --- messages ------------------------------------------------------------------------------------------------

    def carry(self, wire: Wire, way: int, parts: Parts) -> None:
        """Carry one message; ``way`` 0 is to the server."""
        weather, rng = self.weather, self._rng
        ends = (wire.client.process, wire.server.process)
        sender, receiver = ends[way], ends[1 - way]
        self.counts["carried"] += 1
        if (sender.name, receiver.name) in weather.cut:
            self.counts["cut"] += 1
            return
        if weather.loss and rng.random() < weather.loss:
            self.counts["lost"] += 1
            return
        copies = 1
        if weather.double and rng.random() < weather.double:
            self.counts["doubled"] += 1
            copies = 2
        for _ in range(copies):
            slow_s = weather.slow.get(sender.name, 0.0) + weather.slow.get(receiver.name, 0.0)
            begin_s = max(self._conductor.now_s, sender.busy_until_s)
            arrives_s = begin_s + weather.delay_s * (0.3 + 1.4 * rng.random()) + slow_s
            if weather.reorder and rng.random() < weather.reorder:
                self.counts["reordered"] += 1
                arrives_s += min(weather.delay_s * 20, MAX_OVERTAKEN_S) * rng.random()
            else:
                wire.clear_s[way] = arrives_s = max(arrives_s, wire.clear_s[way])
            sender.last_arrival_s = max(sender.last_arrival_s, arrives_s)
            grains = -(-arrives_s // GRAIN_S)
            self._conductor.at(grains * GRAIN_S, self._arrive, wire, way, parts)

    def _arrive(self, wire: Wire, way: int, parts: Parts) -> None:
        if not (wire.open or wire.drains):
            return
        if way:
            wire.client.inbox.put(parts)
        else:
            wire.server.inbox.put((wire.client.route, *parts))


class SimTransport:
    """The counterpart of ``Sockets`` in the simulation."""

    def __init__(self, network: Network, process: Process) -> None:
        self._network = network
        self._process = process

    def bind(
        self, address: str, *, limits: TransportLimits, on_message: OnMessage, on_drained: Callable[[], None] | None
    ) -> tuple[Link, str]:
        link = ServerLink(
            self._network, self._process, address, Inbox(self._process, limits, 2, on_message, on_drained)
        )
        self._network.bind(link)
        return link, address

    def connect(self, address: str, route: bytes, *, limits: TransportLimits, on_message: OnMessage) -> Link:
        inbox = Inbox(self._process, limits, 1, on_message, None)
        return ClientLink(self._network, self._process, address, route, inbox)
