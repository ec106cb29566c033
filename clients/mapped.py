"""Payload that lies in slabs of a shard on this host: mapped, checked, and not copied.

A slab is written anew when no record needs what is in it any more. The groups of a batch that is not consumed are
needed; so who holds views of them lets go of them, or has copied them, before it is.
"""

import hashlib
import mmap
from collections import OrderedDict
from pathlib import Path

from staleflow.protocols.wire.codec import ProtocolError
from staleflow.protocols.wire.messages import Place
from staleflow.protocols.wire.tensors import Array, unpack

MOST = 64
"""Slabs that stay mapped: pages that are mapped already cost nothing to read again."""


class Unreadable(Exception):
    """The bytes of a place cannot be had here, or are not those of its record."""


class MappedSlabs:
    """Those of one shard."""

    def __init__(self) -> None:
        self._maps: OrderedDict[str, memoryview] = OrderedDict()

    def open(self, folder: str, place: Place) -> memoryview:
        """The packed payload, not checked. ``Unreadable``."""
        data = self._maps.get(place.slab)
        if data is None:
            data = self._maps[place.slab] = _mapped(Path(folder) / place.slab)
        self._maps.move_to_end(place.slab)
        while len(self._maps) > MOST:
            self._maps.popitem(last=False)
        if (end := place.offset + place.nbytes) > data.nbytes:
            raise Unreadable(f"{place.slab} has {data.nbytes} bytes, not {end}")
        return data[place.offset : end]


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
    except (OSError, ValueError) as error:
        raise Unreadable(str(error)) from error
