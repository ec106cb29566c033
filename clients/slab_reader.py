"""Payload that lies in slabs of a shard on this host: mapped, checked, and not copied.

A slab is written anew when no record needs what is in it any more. The groups of a batch that is not consumed are
needed; so who holds views of them lets go of them, or has copied them, before it is.
"""

import hashlib
import mmap
import os
from collections import OrderedDict
from pathlib import Path

from staleflow.protocols.wire.codec import ProtocolError
from staleflow.protocols.wire.messages import Place
from staleflow.protocols.wire.tensors import Array, unpack

MOST = 256
"""Slabs of all shards that stay mapped: pages that are mapped already cost nothing to read again, but each map keeps a
descriptor, of which a process has often no more than 1,024."""


class Unmapped(Exception):
    """This process cannot open slabs of that shard, though it is of the same host: in another container, say."""


class Unreadable(Exception):
    """The bytes of a payload are not those of its record: they have changed, or their slab has gone."""


class MappedSlabs:
    """Those that one process reads, of all shards."""

    def __init__(self) -> None:
        self._maps: OrderedDict[str, memoryview] = OrderedDict()
        """By path, which no other slab will ever have."""

    def open(self, folder: str, place: Place) -> memoryview:
        """The packed payload, not checked. ``Unmapped``, ``Unreadable``."""
        path = f"{folder}/{place.slab}"
        data = self._maps.get(path)
        if data is None:
            self._forget_deleted()
            data = self._maps[path] = _mapped(Path(path))
        self._maps.move_to_end(path)
        while len(self._maps) > MOST:
            self._maps.popitem(last=False)
        if (end := place.offset + place.nbytes) > data.nbytes:
            raise Unreadable(f"{place.slab} has {data.nbytes} bytes, not {end}")
        return data[place.offset : end]

    def _forget_deleted(self) -> None:
        """A map would keep the room on disk of a file that is deleted."""
        for path in [path for path in self._maps if not os.path.exists(path)]:
            del self._maps[path]


def checked(data: memoryview, sha: str) -> dict[str, Array]:
    """The arrays of a payload, as views. ``Unreadable`` unless it is the one with that sha256."""
    if hashlib.sha256(data).hexdigest() != sha:
        raise Unreadable("the payload is not what its sha256 says")
    try:
        return unpack(data)
    except ProtocolError as error:
        raise Unreadable(error.detail) from error


def _mapped(path: Path) -> memoryview:
    try:
        with path.open("rb") as file:
            return memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
    except ValueError as error:  # it is empty
        raise Unreadable(f"{path}: {error}") from error
    except OSError as error:
        if isinstance(error, FileNotFoundError) and path.parent.is_dir():  # it was there when its place was given
            raise Unreadable(str(error)) from error
        raise Unmapped(str(error)) from error
