"""Versions whose weights the user moves: the run stores, orders and registers a digest in their place."""

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from staleflow.protocols.wire.tensors import Array

TENSOR: Final = "staleflow.external"
"""Name of the only tensor of such a version: the UTF-8 bytes of the digest."""
MAX_BYTES: Final = 1024


def external(digest: str) -> dict[str, Array]:
    """Return the weights to publish for a version that readers fetch the user's own way.

    ``digest``: name and checksum by which they find and verify it, 1 to ``MAX_BYTES`` bytes. The weights must be
    available to every reader before the version is published, until no instance needs it any more.
    """
    data = digest.encode()
    if not 0 < len(data) <= MAX_BYTES:
        raise ValueError(f"digest has {len(data)} bytes; it must have 1 to {MAX_BYTES}")
    return {TENSOR: np.frombuffer(data, np.uint8)}


def external_digest(weights: Mapping[str, Array]) -> str | None:
    """Return the digest of an external version; None if the run has its weights."""
    array: Any = weights.get(TENSOR)
    return None if array is None or len(weights) != 1 else bytes(array).decode(errors="replace")
