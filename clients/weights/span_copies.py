"""Copies of one rank's part of the weights, which are uploaded while the next step changes the weights."""

import logging
from collections.abc import Iterator

import numpy as np

from staleflow.clients.weights.sharded import ShardedWeights, Span, Spans
from staleflow.process.main_memory import available
from staleflow.protocols.wire.tensors import Array

log = logging.getLogger(__name__)

MAX_SHARE = 0.8
"""Maximum share of the available main memory that the first copy may take."""


class SpanCopies:
    """Main memory for one rank's spans, reused by every version: fresh pages cost more than the copy."""

    def __init__(self) -> None:
        self._buffers: list[Array] = []
        self._spans: list[Span] = []

    def copy(self, weights: ShardedWeights) -> Spans | None:
        """Copy the spans over those of the last version and return the copies; None if there is no room for them."""
        self._spans.clear()
        room = available() * MAX_SHARE
        for number, (offset, data) in enumerate(weights.spans()):
            if number == len(self._buffers) or self._buffers[number].nbytes != data.nbytes:
                del self._buffers[number:]
                if data.nbytes > room:
                    log.warning("training waits for each version: no main memory for a copy of this rank's weights")
                    self._buffers.clear()
                    return None
                room -= data.nbytes
                self._buffers.append(np.empty(data.nbytes, np.uint8))
            np.copyto(self._buffers[number], np.frombuffer(data, np.uint8))
            self._spans.append(Span(offset, self._buffers[number].data))
        return self

    def spans(self) -> Iterator[Span]:
        """Yield the copies."""
        return iter(self._spans)
