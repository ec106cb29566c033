"""Payload in slabs of a shard on this host: mapped, verified, and not copied.

A slab is reused once no record needs its content. The groups of a batch are needed until the batch is consumed. A
reader must therefore drop or copy its views of them before that.
"""

import mmap
import os
from collections import OrderedDict
from pathlib import Path

from staleflow.protocols.wire.codec import ProtocolError
from staleflow.protocols.wire.messages import Place
from staleflow.protocols.wire.payload_digest import matches
from staleflow.protocols.wire.tensors import Array, unpack

MAX_MAPPED = 256
"""Maximum number of mapped slabs of all shards. Mapped pages are free to read again, but each map keeps a
descriptor, and a process often has no more than 1,024 of them."""


class Unmapped(Exception):
    """This process cannot open slabs of the shard although it is on the same host, in another container for
    instance."""


class Unreadable(Exception):
    """The bytes of a payload do not match its record: they have changed, or their slab is gone."""


class MappedSlabs:
    """Slabs of all shards that one process has mapped."""

    def __init__(self) -> None:
        self._maps: OrderedDict[str, memoryview] = OrderedDict()
        """Maps by path; the path of a slab is never reused."""

    def open(self, folder: str, place: Place) -> memoryview:
        """Return the packed payload, unverified. Raise ``Unmapped`` or ``Unreadable``."""
        path = f"{folder}/{place.slab}"
        data = self._maps.get(path)
        if data is None:
            self._forget_deleted()
            data = self._maps[path] = _mapped(Path(path))
        self._maps.move_to_end(path)
        while len(self._maps) > MAX_MAPPED:
            self._maps.popitem(last=False)
        if (end := place.offset + place.nbytes) > data.nbytes:
            raise Unreadable(f"slab {place.slab} has {data.nbytes} bytes; the payload ends at {end}")
        return data[place.offset : end]

    def _forget_deleted(self) -> None:
        """Unmap deleted files: a map keeps the disk space of its file in use."""
        for path in [path for path in self._maps if not os.path.exists(path)]:
            del self._maps[path]


def checked(data: memoryview, sha: str) -> dict[str, Array]:
    """Return the arrays of a payload, as views. Raise ``Unreadable`` unless it has this digest."""
    if not matches(data, sha):
        raise Unreadable("the payload does not match its digest")
    try:
        return unpack(data)
    except ProtocolError as error:
        raise Unreadable(error.detail) from error


def _mapped(path: Path) -> memoryview:
    try:
        with path.open("rb") as file:
            return memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
    except ValueError as error:  # the file is empty
        raise Unreadable(f"{path}: {error}") from error
    except OSError as error:
        if (
            isinstance(error, FileNotFoundError) and path.parent.is_dir()
        ):  # the slab existed when the shard sent the place
            raise Unreadable(str(error)) from error
        raise Unmapped(str(error)) from error
