"""A copy of gathered weights in main memory, so that they can be published while the next step changes them."""

import logging

import numpy as np
from numpy.typing import NDArray

from staleflow.clients.weights.tensors import NamedTensors, copy_into, layout
from staleflow.process.main_memory import available
from staleflow.protocols.wire.messages import Manifest
from staleflow.protocols.wire.tensors import Array

log = logging.getLogger(__name__)

MAX_SHARE = 0.8
"""Maximum share of the available main memory that the copy may take."""


class HostBuffer:
    """Memory for one version, reused by every version: fresh pages cost more than the copy."""

    def __init__(self) -> None:
        self._data: NDArray[np.uint8] = np.empty(0, np.uint8)
        self._places: Manifest | None = None
        """Layout of the last weights. Cached, because asking gathered weights for their shapes costs as much as for
        their bytes."""

    def copy(self, weights: NamedTensors) -> dict[str, Array] | None:
        """Copy the weights over the last ones and return the copies; None if main memory has no room for them.

        Raise ``ValueError`` if names, dtypes or shapes differ from those of the first ones.
        """
        if self._places is None:
            self._places = layout(weights)
        places = self._places
        if places.nbytes > self._data.nbytes:
            room = available()
            if places.nbytes > room * MAX_SHARE:
                log.warning(
                    "training waits for each version: a copy of its weights needs %d MiB, %d MiB of memory are free",
                    *(places.nbytes >> 20, room >> 20),
                )
                return None
            self._data = np.empty(places.nbytes, np.uint8)
        try:
            return copy_into(places, weights, self._data)
        except ValueError:
            self._places = None
            raise
