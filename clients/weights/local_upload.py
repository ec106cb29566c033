"""The server's file of a version, where a publisher is on its host: the bytes go there without a message.

- Each is read once: a piece is small enough to stay in the cache between digest and copy.
- A file that this process writes for the first time is written by ``pwrite``, which makes large pages of it. From the
  second time on it is written through a map: several threads copy at once there, where the lock of a file lets
  one write at a time (docs/decisions/0016).
- A publish that was given up writes no more, and no other begins before that is so: a version that somebody sees does
  not change.
"""

import mmap
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import cast

import numpy as np

from staleflow.clients.weights.chunks import pieces
from staleflow.clients.weights.mmap_cache import KeptMaps
from staleflow.clients.weights.tensors import NamedTensors, in_memory, tensor_of
from staleflow.process.host import boot_id, file_system
from staleflow.protocols.wire.manifest import Digest
from staleflow.protocols.wire.messages import BeginPublishReply, Manifest, TensorEntry
from staleflow.protocols.wire.tensors import Array

PIECE_BYTES = 2 << 20
"""Fits the share of the last-level cache that a core has; smaller ones cost more in Python than they save."""
WRITERS = 4
"""Threads of a publisher: one core alone does not fill the memory of a large machine."""
RESERVES = ("ext4", "tmpfs")
"""File systems that have room for every byte of a file that was written once. On those that share blocks between files
(xfs, btrfs, ZFS) a full disk would end a process that writes through a map (SIGBUS), where ``pwrite`` says so."""
LOOKS = 64
"""Places of a file at which is looked whether the machine still has it in memory."""

Put = Callable[[int, memoryview], None]
"""Puts bytes where they belong in the file."""


class ServerFiles:
    """The files that one publisher writes into, again and again."""

    def __init__(self) -> None:
        self._maps = KeptMaps(mmap.PROT_READ | mmap.PROT_WRITE)
        """Of files that were written to their end."""
        self._writing = threading.Lock()

    def write(
        self, to: BeginPublishReply, places: Manifest, weights: NamedTensors, given_up: threading.Event
    ) -> list[str] | None:
        """Put the bytes where the server will look for them, and return the digest of each tensor.

        None when its file is not within reach, or the publish is ``given_up``.
        """
        if to.host != boot_id():
            return None
        with self._writing:
            try:
                descriptor = os.open(to.path, os.O_RDWR | os.O_CLOEXEC)
            except OSError:
                return None
            try:
                return self._write(descriptor, places, weights, given_up)
            except _GivenUp:
                return None
            finally:
                os.close(descriptor)

    def _write(self, descriptor: int, places: Manifest, weights: NamedTensors, given_up: threading.Event) -> list[str]:
        status = os.fstat(descriptor)
        into = self._into(descriptor, status)

        def put(offset: int, data: memoryview) -> None:
            if given_up.is_set():
                raise _GivenUp
            into(offset, data)

        digests = _write(put, places, weights)
        with suppress(OSError):
            self._maps.keep(status, lambda: os.dup(descriptor))
        return digests

    def forget_deleted(self) -> None:
        """A map keeps the room of a file that is deleted."""
        self._maps.forget_deleted()

    def close(self) -> None:
        """Keep nothing mapped."""
        self._maps.close()

    def _into(self, descriptor: int, status: os.stat_result) -> Put:
        again = status.st_size > 0 and status in self._maps and file_system(status.st_dev) in RESERVES
        if again and _in_memory(descriptor, status.st_size):
            with suppress(OSError):  # no memory for another map
                return _through(self._maps.map(status, lambda: os.dup(descriptor)))
        return lambda offset, data: _pwrite(descriptor, offset, data)


class _GivenUp(Exception):
    """Nobody waits for the version any more."""


def _in_memory(descriptor: int, nbytes: int) -> bool:
    """Whether a file seems to be. What went to the disk would be read before it is written over through a map."""
    for offset in range(0, nbytes, max(nbytes // LOOKS, 1)):
        try:
            os.preadv(descriptor, [bytearray(1)], offset, os.RWF_NOWAIT)
        except BlockingIOError:
            return False
        except OSError:  # a file system that does not say it: tmpfs, which is memory
            return True
    return True


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
