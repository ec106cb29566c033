"""Slabs: files that workers on this host write their payload into, and whoever is on this host maps.

- A slab belongs to one worker process, or to the shard itself for what comes in frames, and only that one writes into
  it. What a worker still writes that was given up on, stopped or fenced lands in slabs of its own, where nothing refers
  to it.
- It is given anew, to the same worker, only when no live record lies in it, no push that is still to be stored names
  it, and the worker writes there no more. So no byte that a record refers to is ever written again.
- Its blocks are reserved when it is made: a full disk is a refusal here, not a SIGBUS in who writes.
- Nothing in a slab says what it holds. Records do, with their sha256; what they do not refer to is garbage, and slabs
  that hold nothing else are deleted at the next start.
- A shard that starts again keeps the slabs that records refer to and reads no new push from them: a worker that still
  has one mapped may have mapped a file that is gone. It gets ``stale`` and sends frames.
- A process that dies leaves the pages to the kernel. ``sync`` brings them to the disk.
- Without room on the disk, a descriptor or memory for a map there is no new slab. A file that cannot be opened for want
  of the last two may be whole: no record is given up for it.
"""

import mmap
import os
import secrets
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from staleflow.configs.durable_files import make_folder
from staleflow.net.errors import Refused
from staleflow.process.host import boot_id
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.consistency.ids import WorkerId
from staleflow.protocols.wire.codec import Data, ProtocolError
from staleflow.protocols.wire.messages import GetSlab, Place, Slab
from staleflow.protocols.wire.tensors import ALIGNMENT
from staleflow.servers.trajectories.records import Key
from staleflow.store.shared_file import SCARCE

MAX_SLAB_BYTES = 16 << 20
MIN_SLAB_BYTES = 1 << 20
ITSELF = WorkerId("")
"""Whose slabs are the shard's own."""
FREE_SLABS = 4
"""On a disk with less room than for so many none is made: what is left is for the records."""
SHARE = 256
"""A slab is this part of a shard's map, within these bounds."""
MAX_UNPUSHED_BYTES = 64 << 20
"""And two slabs: who writes into as much and has pushed nothing of it gets no more. A worker writes 32 MB of groups at
most before it pushes them, and of two slabs that follow each other it fills more than one."""
UNPUSHED_SHARE = 4
"""Of a small map it is this part."""


@dataclass(slots=True, eq=False)
class _Slab:
    """One file."""

    name: str
    data: memoryview
    worker: WorkerId | None
    """Who writes; None: nobody, ever again."""
    written: bool
    """Its worker may still write into it."""
    found: bool = False
    """An earlier process gave it. Its worker may have mapped another file, which had this name before."""
    coming: int = 0
    """Pushes that name a place in it and wait for their commit."""
    live: set[Key] = field(default_factory=set[Key])
    """Records that refer to it."""

    @property
    def empty(self) -> bool:
        """Nothing that lies there has been pushed, or is needed any more."""
        return not self.coming and not self.live

    @property
    def idle(self) -> bool:
        return self.empty and not self.written


class Slabs:
    """Those of one shard, in a folder that is its own."""

    def __init__(self, folder: Path, *, map_bytes: int) -> None:
        self._folder = folder
        self._slab_bytes = min(max(map_bytes // SHARE, MIN_SLAB_BYTES), MAX_SLAB_BYTES)
        self._most_unpushed = min(MAX_UNPUSHED_BYTES, map_bytes // UNPUSHED_SHARE) + 2 * self._slab_bytes
        self._slabs: dict[str, _Slab] = {}
        self._where: dict[Key, str] = {}
        self._given: dict[WorkerId, tuple[int, Slab]] = {}
        """The last question of each worker, and its answer."""
        self._maps: dict[str, mmap.mmap] = {}
        """Of the shard's own slabs, to write. Kept: a new map of a file costs as much as writing it."""
        self._own_name, self._own_end = "", 0
        """The slab that the shard itself writes into, and the end of what is written there."""
        self._first = secrets.token_hex(8)
        self._made = 0

    @property
    def nbytes(self) -> int:
        """Of the slabs that are of use to somebody; the others can go at any time."""
        return sum(slab.data.nbytes for slab in self._slabs.values() if not slab.idle)

    @property
    def folder(self) -> str:
        return str(self._folder)

    def counts(self) -> dict[str, int]:
        """For whoever looks: files, those that hold records, and bytes that are of use."""
        holding = sum(bool(slab.live) for slab in self._slabs.values())
        return {"files": len(self._slabs), "holding": holding, "bytes": self.nbytes}

    # For workers -----------------------------------------------------------------------------------------------------

    def give(self, asked: GetSlab, room: int) -> Slab:
        """An empty slab for that worker, or one without a name if it would take more than ``room`` bytes, the disk has
        none, or the worker has enough. None for who is not on this host: it gives up those that it has. The same
        question has the same answer; an older one is ``Refused``."""
        if asked.worker == ITSELF:
            raise ProtocolError(Code.MALFORMED, "a worker has a name")
        number, answer = self._given.get(asked.worker, (0, None))
        if asked.number < number:
            raise Refused(Code.STALE, f"{asked.worker} has asked for another slab since")
        if asked.number == number and answer is not None:
            return answer
        if asked.host == boot_id():
            answer = self._give(asked, room)
        else:
            self.lose(asked.worker)
            answer = Slab(folder="", name="", nbytes=0, known=[])
        self._given[asked.worker] = asked.number, answer
        return answer

    def _give(self, asked: GetSlab, room: int) -> Slab:
        own = [slab for slab in self._slabs.values() if slab.worker == asked.worker]
        for slab in own:
            slab.written = slab.name in asked.held
        found = None
        if sum(slab.data.nbytes for slab in own if slab.written and slab.empty) < self._most_unpushed:
            found = next((slab for slab in own if slab.idle), None) or self._make(asked.worker, room)
        if found is not None:
            found.written = True
        return Slab(
            folder=self.folder,
            name="" if found is None else found.name,
            nbytes=0 if found is None else found.data.nbytes,
            known=[slab.name for slab in self._slabs.values() if slab.worker == asked.worker],
        )

    def _make(self, worker: WorkerId, room: int) -> _Slab | None:
        total = sum(slab.data.nbytes for slab in self._slabs.values())
        if total - self.nbytes + self._slab_bytes > room:
            self._drop_idle()
        if self._slab_bytes > room:
            return None
        self._made += 1
        name = f"{self._first}-{self._made}"
        path = self._folder / name
        try:
            make_folder(self._folder, 0o700)
            disk = os.statvfs(self._folder)
            if disk.f_bavail * disk.f_frsize < FREE_SLABS * self._slab_bytes:
                return None
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, self._slab_bytes)
            finally:
                os.close(descriptor)
            data = _mapped(path)
        except OSError:
            self._unlink(name)
            return None
        self._slabs[name] = slab = _Slab(name, data, worker, written=True)
        return slab

    def written(self, worker: WorkerId, place: Place) -> memoryview:
        """Return what that worker has written there. ``Refused`` when the slab is gone, or an earlier process gave it:
        its file may have been replaced since, by a backup for instance, and the worker would write into the old one."""
        slab = self._slabs.get(place.slab)
        if slab is None or slab.found:
            raise Refused(Code.STALE, f"slab {place.slab[:40]!r} is gone")
        if slab.worker not in (worker, None):
            raise ProtocolError(Code.MALFORMED, f"slab {slab.name} is not {worker}'s")
        if (end := place.offset + place.nbytes) > slab.data.nbytes:
            raise ProtocolError(Code.MALFORMED, f"bytes {place.offset} to {end} are not in slab {slab.name}")
        return slab.data[place.offset : end]

    def expect(self, name: str) -> None:
        """A push that names a place in it waits for its commit."""
        self._slabs[name].coming += 1

    def settle(self, name: str) -> None:
        """That push is stored now, or never will be."""
        slab = self._slabs[name]
        slab.coming -= 1
        self._drop_if_over(slab)

    def store(self, key: Key, parts: Sequence[Data], nbytes: int, room: Callable[[], int]) -> Place | None:
        """Write what came in frames; None when there is no room for another slab. ``key``'s record refers to it now."""
        own = self._maps.get(self._own_name)
        if (own is None or self._own_end + nbytes > len(own)) and (
            nbytes > self._slab_bytes or not self._open_own(room())
        ):
            return None
        own = self._maps[self._own_name]
        start = offset = self._own_end
        for part in parts:
            own[offset : offset + len(part)] = part
            offset += len(part)
        self._own_end = offset + -offset % ALIGNMENT
        self.hold(key, self._own_name)
        return Place(slab=self._own_name, offset=start, nbytes=nbytes)

    def _open_own(self, room: int) -> bool:
        own = [slab for slab in self._slabs.values() if slab.worker == ITSELF]
        for slab in own:
            slab.written = False
        self._own_name = ""
        found = next((slab for slab in own if slab.idle), None) or self._make(ITSELF, room)
        if found is None:
            return False
        if found.name not in self._maps:
            try:
                with (self._folder / found.name).open("r+b") as file:
                    self._maps[found.name] = mmap.mmap(file.fileno(), found.data.nbytes)
            except OSError:
                found.written = False
                return False
        found.written = True
        self._own_name, self._own_end = found.name, 0
        return True

    def lose(self, worker: WorkerId) -> None:
        """Nothing is heard of that worker any more: its slabs are given to nobody, and go with their last record."""
        self._given.pop(worker, None)
        for slab in [slab for slab in self._slabs.values() if slab.worker == worker]:
            slab.worker, slab.written = None, False
            self._drop_if_over(slab)

    # For records -----------------------------------------------------------------------------------------------------

    def hold(self, key: Key, name: str) -> None:
        """A stored record refers to this slab."""
        self._slabs[name].live.add(key)
        self._where[key] = name

    def free(self, keys: Iterable[Key]) -> None:
        """These records are gone from the store."""
        for key in keys:
            if (name := self._where.pop(key, None)) is not None:
                slab = self._slabs[name]
                slab.live.discard(key)
                self._drop_if_over(slab)

    def read(self, name: str, offset: int, nbytes: int) -> memoryview | None:
        """Bytes of a slab; None when they are not there."""
        slab = self._slabs.get(name)
        end = offset + nbytes
        return slab.data[offset:end] if slab is not None and end <= slab.data.nbytes else None

    def sync(self, names: Iterable[str]) -> None:
        """Bring what was written into them to the disk. ``OSError``."""
        for name in names:
            _sync(self._folder / name)
        _sync(self._folder)

    # At the start ----------------------------------------------------------------------------------------------------

    def find(self, key: Key, name: str, offset: int, nbytes: int) -> bool:
        """Take up a slab that an earlier process gave, for a record that it stored; False when the bytes are lost.
        ``OSError`` when that cannot be said now."""
        if name not in self._slabs:
            try:
                self._slabs[name] = _Slab(
                    name, _mapped(self._folder / Path(name).name), None, written=False, found=True
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
        """Delete what no record refers to."""
        if self._folder.is_dir():
            for path in self._folder.iterdir():
                if path.name not in self._slabs:
                    self._unlink(path.name)

    def _drop_idle(self) -> None:
        for slab in [slab for slab in self._slabs.values() if slab.idle]:
            self._drop(slab)

    def _drop_if_over(self, slab: _Slab) -> None:
        if slab.worker is None and slab.idle:
            self._drop(slab)

    def _drop(self, slab: _Slab) -> None:
        """Its pages live on for as long as somebody maps them."""
        del self._slabs[slab.name]
        self._maps.pop(slab.name, None)
        self._unlink(slab.name)

    def _unlink(self, name: str) -> None:
        """A full disk that copies what it changes has no room even for this: then the next start does it."""
        with suppress(OSError):
            (self._folder / name).unlink()


def _mapped(path: Path) -> memoryview:
    """The whole file, read only. ``ValueError`` when it is empty."""
    with path.open("rb") as file:
        return memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fdatasync(descriptor)
    finally:
        os.close(descriptor)
