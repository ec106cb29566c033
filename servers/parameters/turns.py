"""Limits on the concurrent requests of one peer, so that no other peer waits behind thousands of them."""

import asyncio
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager

from staleflow.net.errors import Refused
from staleflow.protocols.consistency.effects import Code
from staleflow.servers.parameters.versions import Stored, Versions

MAX_PIECES = 64
"""Maximum number of chunks and deltas in progress for one peer. A reader requests four at once; a relay four per
version."""
MAX_MANIFESTS = 8
"""Maximum number of manifests in progress at a relay for one peer. A reader requests one; a child relay one for each
version that its readers want."""


class Turns:
    """Number of requests in progress by peer."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._of = Counter[str]()

    @contextmanager
    def turn(self, peer: str) -> Generator[None]:
        """Count a request of a peer while it is in progress. Raise ``Refused`` with ``BUSY`` at the limit."""
        if self._of[peer] >= self._most:
            raise Refused(Code.BUSY, f"{self._of[peer]} requests of this peer are already in progress")
        self._of[peer] += 1
        try:
            yield
        finally:
            self._of[peer] -= 1
            if not self._of[peer]:
                del self._of[peer]


class FullChecks:
    """Full verifications of versions whose bytes a reader doubts. Concurrent doubts about a version share one check."""

    def __init__(self, versions: Versions) -> None:
        self._versions = versions
        self._running: dict[int, asyncio.Task[None]] = {}

    async def check(self, stored: Stored) -> None:
        """Verify all bytes of a version. Raise ``CorruptVersion`` if they are wrong."""
        if (running := self._running.get(id(stored))) is None:
            checking = asyncio.to_thread(self._versions.verify, stored, doubted=True)
            running = self._running[id(stored)] = asyncio.ensure_future(checking)
            running.add_done_callback(lambda done: self._over(stored, done))
        await asyncio.shield(running)

    def _over(self, stored: Stored, done: "asyncio.Task[None]") -> None:
        del self._running[id(stored)]
        if not done.cancelled():
            done.exception()  # retrieved, because every waiter may have been cancelled
