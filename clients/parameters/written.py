"""The server's file of a version, where a publisher is on its host: the bytes go there without a message.

- Each is read once: a piece is small enough to stay in the cache between digest and copy.
- A file that this process writes for the first time is written by ``pwrite``, which makes large pages of it. From the
  second time on it is written through a map: several threads copy at once there, where the lock of a file lets
  one write at a time (docs/decisions/0016).
"""

import mmap
import os
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import cast

import numpy as np

from staleflow.clients.parameters.chunks import pieces
from staleflow.clients.parameters.kept_maps import KEPT, FileId, KeptMaps, file_id
from staleflow.clients.parameters.tensors import NamedTensors, in_memory, tensor_of
from staleflow.protocols.wire.manifest import Digest
from staleflow.protocols.wire.messages import Manifest, PublishTo, TensorEntry
from staleflow.protocols.wire.tensors import Array
from staleflow.runtime.host import boot_id, file_system

PIECE_BYTES = 2 << 20
"""Fits the share of the last-level cache that a core has; smaller ones cost more in Python than they save."""
WRITERS = 4
"""Threads of a publisher: one core alone does not fill the memory of a large machine."""
RESERVES = ("ext4", "tmpfs", "xfs")
"""File systems that have room for every byte of a file that was written once. Elsewhere a full disk would end a process
that writes through a map (SIGBUS), where ``pwrite`` says so."""

Put = Callable[[int, memoryview], None]
"""Puts bytes where they belong in the file."""


class ServerFiles:
    """The files that one publisher writes into, again and again."""

    def __init__(self) -> None:
        self._maps = KeptMaps(mmap.PROT_READ | mmap.PROT_WRITE)
        self._written = deque[FileId](maxlen=KEPT)

    def write(self, to: PublishTo, places: Manifest, weights: NamedTensors) -> list[str] | None:
        """Put the bytes where the server will look for them, and return the digest of each tensor.

        None when its file is not within reach.
        """
        if to.host != boot_id():
            return None
        try:
            descriptor = os.open(to.path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            status = os.fstat(descriptor)
            digests = _write(self._into(descriptor, status), places, weights)
            if (key := file_id(status)) not in self._written:
                self._written.append(key)
            return digests
        finally:
            os.close(descriptor)

    def forget_deleted(self) -> None:
        """A map keeps the room of a file that is deleted."""
        self._maps.forget_deleted()

    def close(self) -> None:
        """Keep nothing mapped."""
        self._maps.close()

    def _into(self, descriptor: int, status: os.stat_result) -> Put:
        if status.st_size and file_id(status) in self._written and file_system(status.st_dev) in RESERVES:
            with suppress(OSError):  # of memory for another map
                return _through(self._maps.map(status, lambda: os.dup(descriptor)))
        return lambda offset, data: _pwrite(descriptor, offset, data)


def _through(content: mmap.mmap) -> Put:
    target = np.frombuffer(content, np.uint8)

    def put(offset: int, data: memoryview) -> None:
        np.copyto(target[offset : offset + data.nbytes], np.frombuffer(data, np.uint8))

    return put


def _pwrite(descriptor: int, offset: int, data: memoryview) -> None:
    while data.nbytes:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


def _write(put: Put, places: Manifest, weights: NamedTensors) -> list[str]:
    if in_memory(weights):
        return _write_at_once(put, places, cast("Mapping[str, Array]", weights))
    named = zip(places.tensors, weights.items(), strict=True)
    return [_write_tensor(put, entry, name, array) for entry, (name, array) in named]


def _write_at_once(put: Put, places: Manifest, weights: Mapping[str, Array]) -> list[str]:
    """Several tensors at a time, the large ones first: all of them are in memory anyway."""
    order = sorted(places.tensors, key=lambda entry: -entry.nbytes)
    with ThreadPoolExecutor(WRITERS) as writers:
        coming = {e.name: writers.submit(_write_tensor, put, e, e.name, weights[e.name]) for e in order}
        return [coming[entry.name].result() for entry in places.tensors]


def _write_tensor(put: Put, entry: TensorEntry, name: str, array: Array) -> str:
    found = Digest()
    for offset, data in pieces(entry, tensor_of(name, array), PIECE_BYTES):
        found.update(data)
        put(offset, data)
    return found.hex()
