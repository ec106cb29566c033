"""Upload to a parameter server on the same host: bytes are written into the server's file, without messages.

- Each byte is read once: a piece is small enough to stay in the cache between digest and copy.
- A file that this process writes for the first time is written with ``pwrite``, which allocates large pages. From the
  second time on it is written through a map: several threads copy at once there, while the lock of a file admits one
  ``pwrite`` at a time (docs/decisions/0016).
- An abandoned publish stops writing before the next one starts, so that a visible version never changes.
"""

import mmap
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar, cast

import numpy as np

from staleflow.clients.weights.chunks import pieces, split
from staleflow.clients.weights.mmap_cache import KeptMaps
from staleflow.clients.weights.sharded import Span, Spans
from staleflow.clients.weights.tensors import NamedTensors, in_memory, tensor_of
from staleflow.process.host import boot_id, file_system
from staleflow.protocols.wire.manifest import Digest
from staleflow.protocols.wire.messages import BeginPublishReply, Manifest, TensorEntry, WrittenSpan
from staleflow.protocols.wire.tensors import Array

PIECE_BYTES = 2 << 20
"""Fits a core's share of the last-level cache; smaller pieces cost more in Python than they save."""
WRITERS = 4
"""Threads of a publisher: one core does not saturate the memory of a large machine."""
RESERVES = ("ext4", "tmpfs")
"""File systems that reserve every byte of a file that was written once.

On file systems that share blocks between files (xfs, btrfs, ZFS), a full disk would kill a process that writes through
a map (SIGBUS), where ``pwrite`` returns an error.
"""
NUM_PROBES = 64
"""Number of places of a file that are probed for being in the page cache."""

T = TypeVar("T")
Put = Callable[[int, memoryview], None]
"""Function that writes bytes at an offset of the file."""


class ServerFiles:
    """Files that one publisher writes into repeatedly."""

    def __init__(self) -> None:
        self._maps = KeptMaps(mmap.PROT_READ | mmap.PROT_WRITE)
        """Maps of files that were written completely."""
        self._writing = threading.Lock()

    def write(
        self, to: BeginPublishReply, places: Manifest, weights: NamedTensors, given_up: threading.Event
    ) -> list[str] | None:
        """Write the weights into the server's file and return the digest of each tensor.

        Return None if the file cannot be accessed, or the publish is ``given_up``.
        """
        return self._open_and_write(to, given_up, lambda put: _write(put, places, weights))

    def write_spans(self, to: BeginPublishReply, weights: Spans, given_up: threading.Event) -> list[WrittenSpan] | None:
        """Write this rank's part of the weights as ``write`` does, and return its spans with their digests."""
        return self._open_and_write(to, given_up, lambda put: _write_spans(put, weights.spans()))

    def _open_and_write(self, to: BeginPublishReply, given_up: threading.Event, write: Callable[[Put], T]) -> T | None:
        """Return the result of ``write``, which writes all of this process's bytes; None as in ``self.write``."""
        if to.host != boot_id():
            return None
        # An abandoned publish may still be writing in its thread; wait for it to notice that it was given up.
        with self._writing:
            try:
                descriptor = os.open(to.path, os.O_RDWR | os.O_CLOEXEC)
            except OSError:
                return None
            try:
                return self._write(descriptor, given_up, write)
            except _GivenUp:
                return None
            finally:
                os.close(descriptor)

    def _write(self, descriptor: int, given_up: threading.Event, write: Callable[[Put], T]) -> T:
        status = os.fstat(descriptor)
        into = self._into(descriptor, status)

        def put(offset: int, data: memoryview) -> None:
            if given_up.is_set():
                raise _GivenUp
            into(offset, data)

        written = write(put)
        with suppress(OSError):
            self._maps.keep(status, lambda: os.dup(descriptor))
        return written

    def forget_deleted(self) -> None:
        """Drop deleted files: their maps keep the disk space in use."""
        self._maps.forget_deleted()

    def close(self) -> None:
        """Unmap all files."""
        self._maps.close()

    def _into(self, descriptor: int, status: os.stat_result) -> Put:
        reusable = status.st_size > 0 and status in self._maps and file_system(status.st_dev) in RESERVES
        if reusable and _in_memory(descriptor, status.st_size):
            with suppress(OSError):  # no memory for another map
                return _through(self._maps.map(status, lambda: os.dup(descriptor)))
        return lambda offset, data: _pwrite(descriptor, offset, data)


class _GivenUp(Exception):
    """The publish was cancelled."""


def _in_memory(descriptor: int, nbytes: int) -> bool:
    """Return True if a file seems to be in memory. Pages on disk would be read before being overwritten through a
    map."""
    for offset in range(0, nbytes, max(nbytes // NUM_PROBES, 1)):
        try:
            os.preadv(descriptor, [bytearray(1)], offset, os.RWF_NOWAIT)
        except BlockingIOError:
            return False
        except OSError:  # RWF_NOWAIT is unsupported: tmpfs, which is memory
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
    """Write several tensors concurrently, the large ones first. They are all in memory anyway."""
    order = sorted(places.tensors, key=lambda entry: -entry.nbytes)
    with ThreadPoolExecutor(WRITERS) as writers:
        writing = {e.name: writers.submit(_write_tensor, put, e, e.name, weights[e.name]) for e in order}
        return [writing[entry.name].result() for entry in places.tensors]


def _write_spans(put: Put, spans: Iterable[Span]) -> list[WrittenSpan]:
    written: list[WrittenSpan] = []
    for offset, data in spans:
        digest = _write_pieces(put, split(offset, data, PIECE_BYTES))
        written.append(WrittenSpan(offset=offset, nbytes=data.nbytes, digest=digest))
    return written


def _write_tensor(put: Put, entry: TensorEntry, name: str, array: Array) -> str:
    return _write_pieces(put, pieces(entry, tensor_of(name, array), PIECE_BYTES))


def _write_pieces(put: Put, pieces: Iterable[tuple[int, memoryview]]) -> str:
    """Write the pieces and return the digest of all of them, each read once."""
    digest = Digest()
    for offset, data in pieces:
        digest.update(data)
        put(offset, data)
    return digest.hex()
