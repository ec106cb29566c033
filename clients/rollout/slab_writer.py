"""Pass payloads to a shard on the same host: write them once into a file that both map, then only name the place.

- Only this worker writes into its slabs, one group behind the other. When it requests another slab, it returns those
  without a place named in an unanswered push.
- A worker that is on another host, cannot open the file, or finds the shard short of room sends frames instead.
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

GROUPS_BEFORE_RETRY = 64
"""Number of groups sent in frames before a shard without room is request for a slab again."""


class SlabWriter:
    """Slabs of one worker at one shard. Not safe for concurrent tasks."""

    def __init__(self, shard: Client, worker: WorkerId) -> None:
        self._shard = shard
        self._worker = worker
        self._maps: dict[str, mmap.mmap] = {}
        self._open = ""
        """Name of the slab being written; empty if none."""
        self._end = 0
        """End of the written part of that slab."""
        self._pushed: Counter[str] = Counter()
        """Number of unanswered pushes, by slab."""
        self._number = 0
        self._slab_bytes = 0
        """Size of the last slab; 0 before the first."""
        self._groups_until_retry = 0
        self._reachable = True

    async def write(self, parts: list[bytes | memoryview]) -> Place | None:
        """Write the parts consecutively and return their place; return None if they must be sent in frames.

        Call ``settled`` once for each place.
        """
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
        """Release a place after the final reply to its push."""
        self._pushed[place.slab] -= 1
        if not self._pushed[place.slab]:
            del self._pushed[place.slab]

    def abandon(self) -> None:
        """Stop using the current slab, because the shard has restarted and no longer knows it."""
        self._open = ""

    async def _room(self, nbytes: int) -> bool:
        if self._open and self._end + nbytes <= len(self._maps[self._open]):
            return True
        self._groups_until_retry -= 1
        if not self._reachable or self._groups_until_retry > 0 or (self._slab_bytes and nbytes > self._slab_bytes):
            return False
        try:
            slab = await self._next()
        except Refused:
            slab = None
        if slab is None or nbytes > slab.nbytes:
            self._groups_until_retry = GROUPS_BEFORE_RETRY
            return False
        return True

    async def _next(self) -> Slab | None:
        """Request another slab and open it; return None if this worker gets none."""
        self._open = ""
        slab = await self._request(boot_id())
        if slab.name and slab.name not in self._maps:
            try:
                self._maps[slab.name] = _mapped(Path(slab.folder) / slab.name, slab.nbytes)
            except (OSError, ValueError):
                slab = await self._request("")  # return the slab that this worker cannot open
        self._maps = {name: self._maps[name] for name in slab.known if name in self._maps}
        self._reachable = bool(slab.folder)
        if not slab.name:
            return None
        self._open, self._end, self._slab_bytes = slab.name, 0, slab.nbytes
        return slab

    async def _request(self, host: str) -> Slab:
        self._number += 1
        request = GetSlab(worker=self._worker, host=host, number=self._number, held=list(self._pushed))
        return await self._shard.ask(request, Slab, timeout_s=None)


def _mapped(path: Path, nbytes: int) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return mmap.mmap(descriptor, nbytes)
    finally:
        os.close(descriptor)
