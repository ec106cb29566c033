"""The server's file of a version, where it is within reach: a publisher writes into it, a reader maps it.

Each byte is read once on its way in: a piece is small enough to stay in the cache between digest and copy.
"""

import mmap
import os
import weakref
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

import numpy as np

from staleflow.clients.parameters.chunks import pieces
from staleflow.clients.parameters.tensors import NamedTensors, in_memory, tensor_of
from staleflow.protocols.wire.manifest import Digest
from staleflow.protocols.wire.messages import Manifest, ManifestOf, PublishTo, TensorEntry
from staleflow.protocols.wire.tensors import Array
from staleflow.runtime.host import boot_id
from staleflow.runtime.shared_file import hold

PIECE_BYTES = 2 << 20
"""Fits the share of the last-level cache that a core has; smaller ones cost more in Python than they save."""
KEPT = 4
"""Files that stay mapped: those of two versions in use, one that is written, and a spare one."""
WRITERS = 4
"""Threads of a publisher: one core alone does not fill the memory of a large machine."""


def write_file(to: PublishTo, places: Manifest, weights: NamedTensors) -> list[str] | None:
    """Put the bytes where the server will look for them, and return the digest of each tensor.

    None when its file is not within reach.
    """
    if to.host != boot_id():
        return None
    try:
        descriptor = os.open(to.path, os.O_WRONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if in_memory(weights):
            return _write_at_once(descriptor, places, cast("Mapping[str, Array]", weights))
        named = zip(places.tensors, weights.items(), strict=True)
        return [_write_tensor(descriptor, entry, name, array) for entry, (name, array) in named]
    finally:
        os.close(descriptor)


def _write_at_once(descriptor: int, places: Manifest, weights: Mapping[str, Array]) -> list[str]:
    """Several tensors at a time, the large ones first: all of them are in memory anyway."""
    order = sorted(places.tensors, key=lambda entry: -entry.nbytes)
    with ThreadPoolExecutor(WRITERS) as writers:
        coming = {e.name: writers.submit(_write_tensor, descriptor, e, e.name, weights[e.name]) for e in order}
        return [coming[entry.name].result() for entry in places.tensors]


def _write_tensor(descriptor: int, entry: TensorEntry, name: str, array: Array) -> str:
    found = Digest()
    for offset, data in pieces(entry, tensor_of(name, array), PIECE_BYTES):
        found.update(data)
        while data.nbytes:
            written = os.pwrite(descriptor, data, offset)
            data, offset = data[written:], offset + written
    return found.hex()


def map_file(found: ManifestOf) -> memoryview | None:
    """The file of the version, mapped; None when it is not within reach. Nobody writes it while the map lives."""
    maps = Maps()
    try:
        return maps.map(found)
    finally:
        maps.close()


class Maps:
    """Files that a reader maps. The last ones stay mapped for the next versions that are written into them: to map a
    file anew costs half as much as to look at all of its bytes.

    A file is held for as long as anybody has a view of a version, and no longer.
    """

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[int, int], tuple[mmap.mmap, int]] = OrderedDict()
        """By device and inode: the map, and a descriptor that holds nothing."""

    def map(self, found: ManifestOf) -> memoryview | None:
        """The file of the version; None when it is not within reach."""
        if found.host != boot_id():
            return None
        try:
            descriptor = hold(Path(found.path))
        except OSError:
            return None
        try:
            content = self._content(descriptor, found)
        except OSError:
            content = None
        if content is None:
            os.close(descriptor)
            return memoryview(b"") if found.manifest.nbytes == 0 else None
        root = np.frombuffer(content, np.uint8)
        weakref.finalize(root, os.close, descriptor)  # every view of it keeps it alive
        return root.data

    def _content(self, held: int, found: ManifestOf) -> mmap.mmap | None:
        """The map of a file that is held; None when it has another size, or the name is another file's by now."""
        status = os.fstat(held)
        key = status.st_dev, status.st_ino
        known = self._kept.pop(key, None)
        self._forget_deleted()
        if known is not None and len(known[0]) == status.st_size == found.manifest.nbytes:
            self._kept[key] = known
            return known[0]
        if known is not None:
            os.close(known[1])
        if status.st_size != found.manifest.nbytes or status.st_size == 0:
            return None
        descriptor = os.open(found.path, os.O_RDONLY | os.O_CLOEXEC)  # not a copy of the one that holds
        if not os.path.samestat(os.fstat(descriptor), status):
            os.close(descriptor)
            return None
        content = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
        self._kept[key] = content, descriptor
        return content

    def _forget_deleted(self) -> None:
        """A map would keep the room on disk of a file that is deleted."""
        for key, (_, descriptor) in list(self._kept.items()):
            if os.fstat(descriptor).st_nlink == 0 or len(self._kept) >= KEPT:
                os.close(descriptor)
                del self._kept[key]

    def close(self) -> None:
        """Keep nothing mapped beyond what somebody still has a view of."""
        for _, descriptor in self._kept.values():
            os.close(descriptor)
        self._kept.clear()
