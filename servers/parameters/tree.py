"""Distribution tree: assigns each relay its parent and each reader its relay. Pure: endpoints in, endpoints out.

- Relays form a tree below the parameter server, each under the highest node with fewer than ``FANOUT`` child relays. A
  relay keeps its parent for as long as the parent exists.
- A reader gets a relay on its own host. Without one, it gets the parameter server while that has fewer than
  ``ROOT_READERS`` readers, because a relay may be farther away; then the node with the fewest children. It keeps its
  source, too, because the base of its next delta is pinned there.
- A relay whose endpoint is only reachable from its own host serves no other host.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from staleflow.net.addresses import is_loopback
from staleflow.protocols.wire.messages.status import RelayPlace

FANOUT = 4
"""Maximum number of child relays per node."""
ROOT_READERS = 4
"""Number of readers at the parameter server before further ones are sent to a relay on another host."""
ROOT = ""
"""The parameter server itself."""


@dataclass(slots=True)
class Relay:
    """One attached relay."""

    endpoint: str
    host: str
    parent: str = ROOT
    """Worker id of the relay above it, or ``ROOT``."""


class Tree:
    """All relays of the run by worker id, and the source assigned to each reader."""

    def __init__(self) -> None:
        self.relays: dict[str, Relay] = {}
        self._readers: dict[str, str] = {}

    def join(self, worker: str, endpoint: str, host: str) -> list[str]:
        """Add a relay, or refresh it; return the endpoint of its parent, or nothing for the root."""
        if (
            worker not in self.relays
        ):  # a restarted relay: remove its predecessor at this endpoint now rather than at its timeout
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
        """Remove a relay or a reader. Readers of a removed relay get a new source at their next request."""
        self.relays.pop(worker, None)
        self._readers.pop(worker, None)
        for reader, source in list(self._readers.items()):
            if source == worker:
                del self._readers[reader]

    def sources(self, reader: str, host: str) -> list[str]:
        """Return the endpoints to read from before the parameter server."""
        reachable = [worker for worker, relay in self.relays.items() if self._reaches(relay, host)]
        near = [worker for worker in reachable if self.relays[worker].host == host]
        choices = near or [ROOT, *reachable]
        source = self._readers.get(reader, "?")
        if source not in choices:
            self._readers.pop(reader, None)
            has_room = not near and list(self._readers.values()).count(ROOT) < ROOT_READERS
            source = self._readers[reader] = ROOT if has_room else min(choices, key=self.num_below)
        return [self.relays[source].endpoint] if source != ROOT else []

    def num_below(self, place: str) -> int:
        """Return the number of readers and relays directly below a node."""
        relays = sum(relay.parent == place for relay in self.relays.values())
        return relays + sum(source == place for source in self._readers.values())

    def status(self) -> tuple[RelayPlace, ...]:
        """Return the place of every relay."""
        return tuple(
            RelayPlace(relay=worker, endpoint=relay.endpoint, parent=relay.parent, num_below=self.num_below(worker))
            for worker, relay in self.relays.items()
        )

    def _place_for(self, worker: str) -> str:
        """Return the highest node with room that is not below the relay itself; the root if there is none."""
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
