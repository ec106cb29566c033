"""What one peer may have done for it at once, so that no other waits behind thousands of its questions."""

import asyncio
from collections import Counter

from staleflow.net.errors import Refused
from staleflow.protocols.consistency.effects import Code
from staleflow.servers.parameters.versions import Stored, Versions

MAX_PIECES = 64
"""Chunks and deltas that are read or made for one peer at once. A reader asks for four; a relay for four a version."""
MAX_MANIFESTS = 8
"""Versions that a relay looks for at once for one peer. A reader asks for one; a relay for what its readers want."""


class Turns:
    """By peer, what it waits for."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._of = Counter[str]()

    def begin(self, peer: str) -> None:
        """One more. ``Refused`` busy when there are too many."""
        if self._of[peer] >= self._most:
            raise Refused(Code.BUSY, f"{self._of[peer]} questions of this peer wait already")
        self._of[peer] += 1

    def end(self, peer: str) -> None:
        """It has its answer, or is gone."""
        self._of[peer] -= 1
        if not self._of[peer]:
            del self._of[peer]


class Looks:
    """Looks at all bytes of a version that somebody doubts: one at a time, whoever else doubts it meanwhile."""

    def __init__(self, versions: Versions) -> None:
        self._versions = versions
        self._going: dict[int, asyncio.Task[None]] = {}

    async def at(self, stored: Stored) -> None:
        """``CorruptVersion`` unless the bytes are right."""
        if (going := self._going.get(id(stored))) is None:
            looking = asyncio.to_thread(self._versions.verify, stored, doubted=True)
            going = self._going[id(stored)] = asyncio.ensure_future(looking)
            going.add_done_callback(lambda done: self._over(stored, done))
        await asyncio.shield(going)

    def _over(self, stored: Stored, done: "asyncio.Task[None]") -> None:
        del self._going[id(stored)]
        if not done.cancelled():
            done.exception()  # told to whoever waits; nobody may
