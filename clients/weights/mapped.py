"""Maps of the server's file of a version, for readers that can access it."""

import mmap
import os
import weakref
from pathlib import Path

import numpy as np

from staleflow.clients.weights.mmap_cache import KeptMaps
from staleflow.process.host import boot_id
from staleflow.protocols.wire.messages import ManifestReply
from staleflow.store.shared_file import hold


def map_file(reply: ManifestReply) -> memoryview | None:
    """Map the file of a version; return None if it is not accessible. It is not overwritten while the map exists."""
    maps = Maps()
    try:
        return maps.map(reply)
    finally:
        maps.close()


class Maps:
    """Maps of a reader. A file stays locked for as long as a view of its version exists, and no longer."""

    def __init__(self) -> None:
        self._kept = KeptMaps(mmap.PROT_READ)

    def map(self, reply: ManifestReply) -> memoryview | None:
        """Map the file of a version; return None if it is not accessible."""
        if reply.host != boot_id():
            return None
        try:
            descriptor = hold(Path(reply.path))
        except OSError:
            return None
        try:
            content = self._content(descriptor, reply)
        except OSError:
            content = None
        if content is None:
            os.close(descriptor)
            return memoryview(b"") if reply.manifest.nbytes == 0 else None
        root = np.frombuffer(content, np.uint8)
        weakref.finalize(root, os.close, descriptor)  # every view keeps the root, and thereby the lock, alive
        return root.data

    def _content(self, locked: int, reply: ManifestReply) -> mmap.mmap | None:
        """Return the map of a locked file; None if its size is wrong. Raise ``OSError``."""
        status = os.fstat(locked)
        if status.st_size != reply.manifest.nbytes or status.st_size == 0:
            return None

        def opened() -> int:
            descriptor = os.open(
                reply.path, os.O_RDONLY | os.O_CLOEXEC
            )  # not a dup: that would share the lock and keep it
            if not os.path.samestat(os.fstat(descriptor), status):
                os.close(descriptor)
                raise FileNotFoundError(reply.path)  # the name belongs to another file by now
            return descriptor

        return self._kept.map(status, opened)

    def close(self) -> None:
        """Drop all maps. Views that exist stay valid."""
        self._kept.close()
