"""Slabs: files that workers on this host write payload into and readers on this host map.

- A slab belongs to one worker process, or to the shard itself for payload that arrives in frames. Only its owner writes
  into it. Late writes of a lost, stopped or fenced worker land in its own slabs, where no record refers to them.
- A slab is reused, by the same worker, only when no live record lies in it, no pending push names it, and the worker no
  longer writes there. So bytes that a record refers to are never overwritten.
- Its blocks are reserved at creation: a full disk is an error here, not a SIGBUS in the writer.
- A slab has no index. Records, with their digests, define its content; all other bytes are garbage, and slabs without
  records are deleted at the next start.
- A restarted shard keeps the slabs that records refer to and accepts no new push from them: the file that a worker
  still has mapped may have been replaced. The worker gets ``STALE`` and sends frames.
- When a process dies, its dirty pages are left to the kernel. ``sync`` writes them to the disk.
- Without room on the disk, or without a descriptor or memory for a map, no slab is created. A file that cannot be
  opened for lack of a descriptor or memory may be intact: no record is given up for it.
"""

import mmap
import os
import secrets
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from staleflow.configs.durable_files import make_folder
from staleflow.net.errors import Refused
from staleflow.process.host import boot_id
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.consistency.ids import WorkerId
from staleflow.protocols.wire.codec import ProtocolError
from staleflow.protocols.wire.messages import GetSlab, Place, Slab
from staleflow.protocols.wire.tensors import ALIGNMENT
from staleflow.servers.trajectories.records import Key
from staleflow.store.shared_file import SCARCE

MAX_SLAB_BYTES = 16 << 20
MIN_SLAB_BYTES = 1 << 20
OWN = WorkerId("")
"""Owner name of the shard's own slabs. No worker has an empty name."""
MIN_FREE_SLABS = 4
"""No slab is created if the disk has room for fewer slabs than this: the rest is reserved for the records."""
MAP_SHARE = 256
"""A slab is this fraction (1/256) of the shard's map, within the two bounds above."""
MAX_UNPUSHED_BYTES = 64 << 20
"""Maximum bytes per worker, beyond two slabs, in slabs without pushed payload.

A worker writes at most 32 MB of groups before it pushes them, and a group that does not fit the rest of a slab starts
the next one.
"""
UNPUSHED_SHARE = 4
"""For a small map, the bound is this fraction (1/4) of the map."""


@dataclass(slots=True, eq=False)
class _Slab:
    """One slab file."""

    name: str
    data: memoryview
    worker: WorkerId | None
    """Owner; None: no process writes here any more."""
    writable: bool
    """Its owner may still write into it."""
    inherited: bool = False
    """Created by an earlier process. Its worker may have mapped another file, which had this name before."""
    pending_pushes: int = 0
    """Pushes that name a place in it and wait for their commit."""
    live: set[Key] = field(default_factory=set[Key])
    """Records that lie in it."""

    @property
    def empty(self) -> bool:
        """True if no pushed payload lies in it that is still needed or pending."""
        return not self.pending_pushes and not self.live

    @property
    def idle(self) -> bool:
        return self.empty and not self.writable


class Slabs:
    """Slabs of one shard, in a folder of their own."""

    def __init__(self, folder: Path, *, map_bytes: int) -> None:
        self._folder = folder
        self._slab_bytes = min(max(map_bytes // MAP_SHARE, MIN_SLAB_BYTES), MAX_SLAB_BYTES)
        self._most_unpushed = min(MAX_UNPUSHED_BYTES, map_bytes // UNPUSHED_SHARE) + 2 * self._slab_bytes
        self._slabs: dict[str, _Slab] = {}
        self._where: dict[Key, str] = {}
        self._replies: dict[WorkerId, tuple[int, Slab]] = {}
        """Number of the newest request of each worker, with its reply."""
        self._maps: dict[str, mmap.mmap] = {}
        """Writable maps of the shard's own slabs. Cached: mapping a file again costs as much as writing it."""
        self._own_name, self._own_end = "", 0
        """The slab that the shard itself writes into, and the end of the data in it."""
        self._first = secrets.token_hex(8)
        self._num_created = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the slabs in use; idle ones can be deleted at any time."""
        return sum(slab.data.nbytes for slab in self._slabs.values() if not slab.idle)

    @property
    def folder(self) -> str:
        return str(self._folder)

    def counts(self) -> dict[str, int]:
        """Return counts for ``staleflow status``: files, files that hold records, and bytes in use."""
        holding = sum(bool(slab.live) for slab in self._slabs.values())
        return {"files": len(self._slabs), "holding": holding, "bytes": self.nbytes}

    # For workers -----------------------------------------------------------------------------------------------------

    def give(self, asked: GetSlab, room: int) -> Slab:
        """Assign an empty slab to a worker on this host.

        Return one without a name if it would need more than ``room`` bytes, the disk is full, or the worker has enough.
        A worker on another host gets none and gives up those that it has. The same request gets the same reply; an
        older one raises ``Refused``.
        """
        if asked.worker == OWN:
            raise ProtocolError(Code.MALFORMED, "the worker name is empty")
        number, answer = self._replies.get(asked.worker, (0, None))
        if asked.number < number:
            raise Refused(Code.STALE, f"{asked.worker} has requested a newer slab since")
        if asked.number == number and answer is not None:
            return answer
        if asked.host == boot_id():
            answer = self._give(asked, room)
        else:
            self.lose(asked.worker)
            answer = Slab(folder="", name="", nbytes=0, known=[])
        self._replies[asked.worker] = asked.number, answer
        return answer

    def _give(self, asked: GetSlab, room: int) -> Slab:
        own = [slab for slab in self._slabs.values() if slab.worker == asked.worker]
        for slab in own:
            slab.writable = slab.name in asked.held
        assigned = None
        if sum(slab.data.nbytes for slab in own if slab.writable and slab.empty) < self._most_unpushed:
            assigned = next((slab for slab in own if slab.idle), None) or self._make(asked.worker, room)
        if assigned is not None:
            assigned.writable = True
        return Slab(
            folder=self.folder,
            name="" if assigned is None else assigned.name,
            nbytes=0 if assigned is None else assigned.data.nbytes,
            known=[slab.name for slab in self._slabs.values() if slab.worker == asked.worker],
        )

    def _make(self, worker: WorkerId, room: int) -> _Slab | None:
        total = sum(slab.data.nbytes for slab in self._slabs.values())
        if total - self.nbytes + self._slab_bytes > room:
            self._drop_idle()
        if self._slab_bytes > room:
            return None
        self._num_created += 1
        name = f"{self._first}-{self._num_created}"
        path = self._folder / name
        try:
            make_folder(self._folder, 0o700)
            disk = os.statvfs(self._folder)
            if disk.f_bavail * disk.f_frsize < MIN_FREE_SLABS * self._slab_bytes:
                return None
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                # Reserve every block now: a write through a map of a sparse file raises SIGBUS when the disk is full.
                os.posix_fallocate(descriptor, 0, self._slab_bytes)
            finally:
                os.close(descriptor)
            data = _mapped(path)
        except OSError:
            self._unlink(name)
            return None
        self._slabs[name] = slab = _Slab(name, data, worker, writable=True)
        return slab

    def written_bytes(self, worker: WorkerId, place: Place) -> memoryview:
        """Return the bytes that a worker has written at ``place``.

        Raise ``Refused`` if the slab is gone or an earlier process created it: its file may have been replaced since,
        by a backup for instance, and the worker would be writing into the old one.
        """
        slab = self._slabs.get(place.slab)
        if slab is None or slab.inherited:
            raise Refused(Code.STALE, f"slab {place.slab[:40]!r} is gone")
        if slab.worker not in (worker, None):
            raise ProtocolError(Code.MALFORMED, f"slab {slab.name} does not belong to {worker}")
        if (end := place.offset + place.nbytes) > slab.data.nbytes:
            raise ProtocolError(Code.MALFORMED, f"bytes {place.offset} to {end} are outside slab {slab.name}")
        return slab.data[place.offset : end]

    def expect(self, name: str) -> None:
        """Register a pending push that names a place in this slab, so that the slab is not reused."""
        self._slabs[name].pending_pushes += 1

    def settle(self, name: str) -> None:
        """Unregister a pending push: it is stored, or has failed for good."""
        slab = self._slabs[name]
        slab.pending_pushes -= 1
        self._drop_if_retired(slab)

    def store(self, key: Key, blob: bytes, room: Callable[[], int]) -> Place | None:
        """Write payload that arrived in frames into the shard's own slab, for the record of ``key``.

        Return None if there is no room for another slab.
        """
        own, nbytes = self._maps.get(self._own_name), len(blob)
        if (own is None or self._own_end + nbytes > len(own)) and (
            nbytes > self._slab_bytes or not self._open_own(room())
        ):
            return None
        own = self._maps[self._own_name]
        start, end = self._own_end, self._own_end + nbytes
        own[start:end] = blob
        self._own_end = end + -end % ALIGNMENT
        self.hold(key, self._own_name)
        return Place(slab=self._own_name, offset=start, nbytes=nbytes)

    def _open_own(self, room: int) -> bool:
        own = [slab for slab in self._slabs.values() if slab.worker == OWN]
        for slab in own:
            slab.writable = False
        self._own_name = ""
        current = next((slab for slab in own if slab.idle), None) or self._make(OWN, room)
        if current is None:
            return False
        if current.name not in self._maps:
            try:
                with (self._folder / current.name).open("r+b") as file:
                    self._maps[current.name] = mmap.mmap(file.fileno(), current.data.nbytes)
            except OSError:
                current.writable = False
                return False
        current.writable = True
        self._own_name, self._own_end = current.name, 0
        return True

    def lose(self, worker: WorkerId) -> None:
        """Retire the slabs of a lost worker: they are never assigned again and are deleted with their last record."""
        self._replies.pop(worker, None)
        for slab in [slab for slab in self._slabs.values() if slab.worker == worker]:
            slab.worker, slab.writable = None, False
            self._drop_if_retired(slab)

    # For records -----------------------------------------------------------------------------------------------------

    def hold(self, key: Key, name: str) -> None:
        """Note that a stored record lies in this slab."""
        self._slabs[name].live.add(key)
        self._where[key] = name

    def free(self, keys: Iterable[Key]) -> None:
        """Note that these records were deleted from the store."""
        for key in keys:
            if (name := self._where.pop(key, None)) is not None:
                slab = self._slabs[name]
                slab.live.discard(key)
                self._drop_if_retired(slab)

    def read(self, name: str, offset: int, nbytes: int) -> memoryview | None:
        """Return bytes of a slab; None if it does not have them."""
        slab = self._slabs.get(name)
        end = offset + nbytes
        return slab.data[offset:end] if slab is not None and end <= slab.data.nbytes else None

    def sync(self, names: Iterable[str]) -> None:
        """Write the slabs to the disk. Raise ``OSError``."""
        for name in names:
            _sync(self._folder / name)
        _sync(self._folder)

    # At the start ----------------------------------------------------------------------------------------------------

    def find(self, key: Key, name: str, offset: int, nbytes: int) -> bool:
        """Adopt a slab of an earlier process for a stored record; return False if its bytes are lost.

        Raise ``OSError`` if a shortage of descriptors or memory leaves that undecided.
        """
        if name not in self._slabs:
            try:
                self._slabs[name] = _Slab(
                    name, _mapped(self._folder / Path(name).name), None, writable=False, inherited=True
                )
            except (OSError, ValueError) as error:
                if isinstance(error, OSError) and error.errno in SCARCE:
                    raise
                return False
        if self.read(name, offset, nbytes) is None:
            return False
        self.hold(key, name)
        return True

    def clear(self) -> None:
        """Delete all files without records."""
        if self._folder.is_dir():
            for path in self._folder.iterdir():
                if path.name not in self._slabs:
                    self._unlink(path.name)

    def _drop_idle(self) -> None:
        for slab in [slab for slab in self._slabs.values() if slab.idle]:
            self._drop(slab)

    def _drop_if_retired(self, slab: _Slab) -> None:
        if slab.worker is None and slab.idle:
            self._drop(slab)

    def _drop(self, slab: _Slab) -> None:
        """Delete a slab. Its pages stay valid for readers that have it mapped."""
        del self._slabs[slab.name]
        self._maps.pop(slab.name, None)
        self._unlink(slab.name)

    def _unlink(self, name: str) -> None:
        """Delete a file. A full copy-on-write disk may have no room even for that; the next start deletes the file
        then."""
        with suppress(OSError):
            (self._folder / name).unlink()


def _mapped(path: Path) -> memoryview:
    """Map a whole file for reading. Raise ``ValueError`` if it is empty."""
    with path.open("rb") as file:
        return memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fdatasync(descriptor)
    finally:
        os.close(descriptor)
