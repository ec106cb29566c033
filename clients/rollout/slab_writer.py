"""The way of payload to a shard on the same host: written once into a file that both map, and then only named.

- This worker alone writes into its slabs, one group behind the other. A slab goes back when another is asked for, if no
  push that named a place in it still waits for its answer.
- Whoever is on another host, may not open the file, or finds the shard short of room sends frames instead.
"""

import mmap
import os
from collections import Counter
from pathlib import Path

from staleflow.net.client import Client
from staleflow.net.errors import Refused
from staleflow.process.host import boot_id
from staleflow.protocols.consistency.ids import WorkerId
from staleflow.protocols.wire.messages import GetSlab, Place, Slab
from staleflow.protocols.wire.tensors import ALIGNMENT

WITHOUT = 64
"""Groups that are sent in frames before a shard that had no room is asked for a slab again."""


class SlabWriter:
    """Where one worker writes for one shard. For one task."""

    def __init__(self, shard: Client, worker: WorkerId) -> None:
        self._shard = shard
        self._worker = worker
        self._maps: dict[str, mmap.mmap] = {}
        self._open = ""
        """The slab that is written into; empty: none."""
        self._end = 0
        """Of what is written there."""
        self._pushed: Counter[str] = Counter()
        """Pushes without an answer, by slab."""
        self._number = 0
        self._slab_bytes = 0
        """0 before there was one."""
        self._without = 0
        self._reachable = True

    async def write(self, parts: list[bytes | memoryview]) -> Place | None:
        """Where these bytes are now, one part behind the other; None when they have to be sent. ``settled`` is called
        once for each place."""
        nbytes = sum(map(len, parts))
        if not await self._room(nbytes):
            return None
        data, name = self._maps[self._open], self._open
        start = offset = self._end
        for part in parts:
            data[offset : offset + len(part)] = part
            offset += len(part)
        self._end = offset + -offset % ALIGNMENT
        self._pushed[name] += 1
        return Place(slab=name, offset=start, nbytes=nbytes)

    def settled(self, place: Place) -> None:
        """The push that named this place has its final answer."""
        self._pushed[place.slab] -= 1
        if not self._pushed[place.slab]:
            del self._pushed[place.slab]

    def abandon(self) -> None:
        """The shard has begun anew: what it gave counts no more."""
        self._open = ""

    async def _room(self, nbytes: int) -> bool:
        if self._open and self._end + nbytes <= len(self._maps[self._open]):
            return True
        self._without -= 1
        if not self._reachable or self._without > 0 or (self._slab_bytes and nbytes > self._slab_bytes):
            return False
        try:
            slab = await self._next()
        except Refused:
            slab = None
        if slab is None or nbytes > slab.nbytes:
            self._without = WITHOUT
            return False
        return True

    async def _next(self) -> Slab | None:
        """Ask for another slab and open it; None when there is none for this worker."""
        self._open = ""
        slab = await self._ask(boot_id())
        if slab.name and slab.name not in self._maps:
            try:
                self._maps[slab.name] = _mapped(Path(slab.folder) / slab.name, slab.nbytes)
            except (OSError, ValueError):
                slab = await self._ask("")  # it goes back
        self._maps = {name: self._maps[name] for name in slab.known if name in self._maps}
        self._reachable = bool(slab.folder)
        if not slab.name:
            return None
        self._open, self._end, self._slab_bytes = slab.name, 0, slab.nbytes
        return slab

    async def _ask(self, host: str) -> Slab:
        self._number += 1
        asked = GetSlab(worker=self._worker, host=host, number=self._number, held=list(self._pushed))
        return await self._shard.ask(asked, Slab, timeout_s=None)


def _mapped(path: Path, nbytes: int) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return mmap.mmap(descriptor, nbytes)
    finally:
        os.close(descriptor)
