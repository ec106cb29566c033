# pyright: basic, reportMissingImports=false
"""The reader's side of a direct transfer: from the trainer's memory into its own, verified as it arrives."""

import mmap
import secrets
from contextlib import closing

import msgspec
import numpy as np

from staleflow.clients.weights.direct import (
    ASKS,
    Answer,
    Ask,
    Group,
    answer_key,
    card,
    check_torch,
    connect,
    here_key,
)
from staleflow.clients.weights.remote import is_free, room
from staleflow.net.weights import is_right
from staleflow.protocols.consistency.ids import WorkerId
from staleflow.protocols.wire.messages import GetManifest, Manifest


class DirectReader:
    """One reader. Blocking; one transfer at a time."""

    def __init__(self, worker: WorkerId) -> None:
        check_torch()
        self._worker = worker
        self._card = card()
        self._last: mmap.mmap | None = None

    def take(self, endpoint: str, asked: GetManifest, manifest: Manifest) -> memoryview | str:
        """Return all bytes of the version, verified, or the reason why they do not come from the trainer."""
        try:
            store, name = connect(endpoint), f"{self._worker}-{asked.version}-{secrets.token_hex(4)}"
            ask = Ask(group=name, lineage=asked.lineage, version=asked.version, nbytes=manifest.nbytes, card=self._card)
            store.queue_push(ASKS, msgspec.json.encode(ask))
            answer = msgspec.json.decode(store.get(answer_key(name)), type=Answer)
            store.set(here_key(name), b"")
            if not answer.backend:
                return f"{endpoint}: {answer.why}"
            buffer = self._memory(manifest.nbytes)
            with closing(Group(answer, store, name, rank=1)) as group:
                damaged = _received(group, manifest, buffer)
        except (OSError, RuntimeError, msgspec.DecodeError) as error:  # torch.distributed raises RuntimeError
            return f"{endpoint}: {error}"
        self._last = buffer
        return damaged or memoryview(buffer).toreadonly()

    def _memory(self, nbytes: int) -> mmap.mmap:
        """Return the memory of the last version if no view of it exists, else new memory."""
        last = self._last
        return last if last is not None and len(last) == nbytes and is_free(last) else room(nbytes)


def _received(group: Group, manifest: Manifest, buffer: mmap.mmap) -> str:
    """Fill and verify the buffer; return what is wrong with the bytes, or ""."""
    data, remaining = memoryview(buffer), iter(manifest.tensors)
    entry = next(remaining, None)
    for arrived in group.take(np.frombuffer(buffer, np.uint8, manifest.nbytes)):
        while entry is not None and entry.offset + entry.nbytes <= arrived:
            if not is_right(entry, data):
                return f"tensor {entry.name} does not match its digest"
            entry = next(remaining, None)
    return ""
