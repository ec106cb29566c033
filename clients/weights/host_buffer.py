"""Copies of weights in main memory, which are published while the next step changes the weights.

Every version reuses the memory of the one before: fresh pages cost more than the copy.
"""

import logging
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from staleflow.clients.weights.sharded import ShardedWeights, Span, Spans
from staleflow.clients.weights.tensors import NamedTensors, copy_into
from staleflow.process.main_memory import available
from staleflow.protocols.wire.messages import Manifest
from staleflow.protocols.wire.tensors import Array

log = logging.getLogger(__name__)

MAX_SHARE = 0.8
"""Maximum share of the available main memory that a copy may take."""


class HostBuffer:
    """Copies of weights that one process gathers."""

    def __init__(self) -> None:
        self._data: NDArray[np.uint8] = np.empty(0, np.uint8)

    def copy(self, places: Manifest, weights: NamedTensors) -> dict[str, Array] | None:
        """Copy the weights over the last ones and return the copies; None if main memory has no room for them.

        Raise ``ValueError`` if the weights do not match the layout ``places``.
        """
        if places.nbytes > self._data.nbytes:
            if not _fits(places.nbytes, available()):
                return None
            self._data = np.empty(places.nbytes, np.uint8)
        return copy_into(places, weights, self._data)


class SpanCopies:
    """Copies of one rank's part of the weights."""

    def __init__(self) -> None:
        self._buffers: list[Array] = []
        self._spans: list[Span] = []

    def copy(self, weights: ShardedWeights) -> Spans | None:
        """Copy the spans over those of the last version and return the copies; None if there is no room for them."""
        self._spans.clear()
        free, nbytes = available(), 0
        for number, (offset, data) in enumerate(weights.spans()):
            if number == len(self._buffers) or self._buffers[number].nbytes != data.nbytes:
                del self._buffers[number:]
                nbytes += data.nbytes
                if not _fits(nbytes, free):
                    self._buffers.clear()
                    return None
                self._buffers.append(np.empty(data.nbytes, np.uint8))
            np.copyto(self._buffers[number], np.frombuffer(data, np.uint8))
            self._spans.append(Span(offset, self._buffers[number].data))
        return self

    def spans(self) -> Iterator[Span]:
        """Yield the copies."""
        return iter(self._spans)


def _fits(nbytes: int, free: int) -> bool:
    """Return whether a copy of ``nbytes`` may be made if ``free`` bytes of memory are available; log it if not."""
    if nbytes <= free * MAX_SHARE:
        return True
    log.warning(
        "training waits for each version: a copy of its weights needs at least %d MiB, %d MiB of memory are free",
        *(nbytes >> 20, free >> 20),
    )
    return False
