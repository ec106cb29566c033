"""Log of the observed lengths of the last groups in the scheduler's store, so that a restart can restore them.

Observations are stored in chunks: a crash loses fewer than ``CHUNK`` of them, and most commits write none.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from staleflow.protocols.wire.messages import FEATURES
from staleflow.protocols.wire.tensors import Array, pack, unpack
from staleflow.store.base import Read, Write, key_number, number_key

TABLE = "lengths"
CHUNK = 256
"""Number of observations in a chunk."""
CHUNKS = 512
"""Number of stored chunks: the last 131,072 groups, 10 MB with features and 2 MB without; loaded in half a second."""


class Observed(NamedTuple):
    """The observation of one pushed group."""

    row: int
    length: float
    """Mean logarithm of the samples' token counts."""
    features: Array | None
    """Features of the prompt; None if unknown."""


class LengthLog:
    """Appends observations; the owner saves them with the next commit."""

    def __init__(self) -> None:
        self._open: list[Observed] = []
        self._full: list[bytes] = []
        self._next = 0

    def load(self, txn: Read) -> Iterator[Observed]:
        """Iterate over the stored observations, oldest first."""
        for key, blob in txn.items(TABLE):
            self._next = key_number(key) + 1
            chunk = unpack(blob)
            rows: list[int] = chunk["rows"].tolist()
            lengths: list[float] = chunk["lengths"].tolist()
            described: list[bool] = (~np.isnan(chunk["features"][:, 0])).tolist()
            for row, length, features, has_features in zip(rows, lengths, chunk["features"], described, strict=True):
                yield Observed(row, length, features if has_features else None)

    def add(self, observed: Observed) -> None:
        """Append an observation."""
        self._open.append(observed)
        if len(self._open) == CHUNK:
            self._full.append(_packed(self._open))
            self._open = []

    @property
    def changed(self) -> bool:
        """True if unsaved full chunks exist."""
        return bool(self._full)

    def save(self, txn: Write) -> None:
        """Write the full chunks, and delete those beyond ``CHUNKS``."""
        for number, blob in enumerate(self._full, start=self._next):
            txn.put(TABLE, number_key(number), blob)
            if number >= CHUNKS:
                txn.delete(TABLE, number_key(number - CHUNKS))

    def saved(self) -> None:
        """Note that the chunks of ``save`` are durable."""
        self._next += len(self._full)
        self._full = []


def _packed(chunk: list[Observed]) -> bytes:
    unknown = np.full(FEATURES, np.nan, np.float16)
    described = any(observed.features is not None for observed in chunk)
    features = [unknown if observed.features is None else observed.features for observed in chunk]
    return pack(
        {
            "rows": np.array([observed.row for observed in chunk], np.int64),
            "lengths": np.array([observed.length for observed in chunk], np.float32),
            "features": np.array(features, np.float16)[:, : FEATURES if described else 1],
        }
    )
