"""Which relay reads from where, and which reader from which relay. Pure: endpoints in, endpoints out.

- Relays hang in a tree under the parameter server, each under the highest place that has fewer than ``FANOUT`` others
  below it. One stays where it is for as long as its source is there.
- A reader gets a relay of its own host; without one the parameter server while that has fewer than ``ROOT_READERS``,
  for a relay may be farther away; then whoever has the fewest. It stays there too, since that is where the bytes are
  pinned that its next delta is made from.
- A relay that can be reached from its own host only is nobody else's.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from staleflow.net.addresses import is_loopback

FANOUT = 4
"""Relays right below one place."""
ROOT_READERS = 4
"""Readers at the parameter server itself before others are sent to a relay on another host."""
ROOT = ""
"""Stands for the parameter server itself."""


@dataclass(slots=True)
class Relay:
    """One relay that is there."""

    endpoint: str
    host: str
    parent: str = ROOT
    """Worker id of the relay above it, or ``ROOT``."""


class Tree:
    """All relays of the run, by worker id, and who was sent to which of them."""

    def __init__(self) -> None:
        self.relays: dict[str, Relay] = {}
        self._readers: dict[str, str] = {}

    def join(self, worker: str, endpoint: str, host: str) -> list[str]:
        """A relay is there, or still is: where it gets its bytes."""
        if worker not in self.relays:  # an earlier process of that place is gone, if nobody has noticed yet
            for other in [
                name for name, relay in self.relays.items() if (relay.endpoint, relay.host) == (endpoint, host)
            ]:
                self.leave(other)
        relay = self.relays.setdefault(worker, Relay(endpoint, host, "?"))
        relay.endpoint, relay.host = endpoint, host
        if relay.parent != ROOT and relay.parent not in self.relays:
            relay.parent = self._place_for(worker)
        return [self.relays[relay.parent].endpoint] if relay.parent != ROOT else []

    def leave(self, worker: str) -> None:
        """A relay or a reader is gone; who read from it asks again."""
        self.relays.pop(worker, None)
        self._readers.pop(worker, None)
        for reader, source in list(self._readers.items()):
            if source == worker:
                del self._readers[reader]

    def sources(self, reader: str, host: str) -> list[str]:
        """Where a reader gets its bytes, before it asks the parameter server itself."""
        there = [worker for worker, relay in self.relays.items() if self._reaches(relay, host)]
        near = [worker for worker in there if self.relays[worker].host == host]
        choices = near or [ROOT, *there]
        source = self._readers.get(reader, "?")
        if source not in choices:
            self._readers.pop(reader, None)
            has_room = not near and list(self._readers.values()).count(ROOT) < ROOT_READERS
            source = self._readers[reader] = ROOT if has_room else min(choices, key=self.num_below)
        return [self.relays[source].endpoint] if source != ROOT else []

    def num_below(self, place: str) -> int:
        """Readers and relays that get their bytes right there."""
        relays = sum(relay.parent == place for relay in self.relays.values())
        return relays + sum(source == place for source in self._readers.values())

    def status(self) -> list[dict[str, Any]]:
        """Every relay: where it is, what it hangs below, how many get their bytes there."""
        return [
            {"relay": worker, "endpoint": relay.endpoint, "from": relay.parent, "num_below": self.num_below(worker)}
            for worker, relay in self.relays.items()
        ]

    def _place_for(self, worker: str) -> str:
        """The highest place with room that is not below the relay itself; the root if there is none."""
        mine, host = set(self._below(worker)), self.relays[worker].host
        level = [ROOT]
        while level:
            for place in level:
                children = [w for w, relay in self.relays.items() if relay.parent == place and w != worker]
                if len(children) < FANOUT and (place == ROOT or self._reaches(self.relays[place], host)):
                    return place
            level = [w for w, relay in self.relays.items() if relay.parent in level and w not in mine]
        return ROOT

    def _below(self, worker: str) -> Iterator[str]:
        yield worker
        for other, relay in self.relays.items():
            if relay.parent == worker:
                yield from self._below(other)

    def _reaches(self, relay: Relay, host: str) -> bool:
        return relay.host == host or not is_loopback(relay.endpoint)
