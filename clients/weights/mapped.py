"""The server's file of a version, where it is within a reader's reach, mapped."""

import mmap
import os
import weakref
from pathlib import Path

import numpy as np

from staleflow.clients.weights.mmap_cache import KeptMaps
from staleflow.process.host import boot_id
from staleflow.protocols.wire.messages import ManifestReply
from staleflow.store.shared_file import hold


def map_file(found: ManifestReply) -> memoryview | None:
    """The file of the version, mapped; None when it is not within reach. Nobody writes it while the map lives."""
    maps = Maps()
    try:
        return maps.map(found)
    finally:
        maps.close()


class Maps:
    """Files that a reader maps. A file is held for as long as anybody has a view of a version, and no longer."""

    def __init__(self) -> None:
        self._kept = KeptMaps(mmap.PROT_READ)

    def map(self, found: ManifestReply) -> memoryview | None:
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

    def _content(self, held: int, found: ManifestReply) -> mmap.mmap | None:
        """The map of a file that is held; None when it has another size. ``OSError``."""
        status = os.fstat(held)
        if status.st_size != found.manifest.nbytes or status.st_size == 0:
            return None

        def opened() -> int:
            descriptor = os.open(found.path, os.O_RDONLY | os.O_CLOEXEC)  # not a copy of the one that holds
            if not os.path.samestat(os.fstat(descriptor), status):
                os.close(descriptor)
                raise FileNotFoundError(found.path)  # the name is another file's by now
            return descriptor

        return self._kept.map(status, opened)

    def close(self) -> None:
        """Keep nothing mapped beyond what somebody still has a view of."""
        self._kept.close()
