"""What the samples of each prompt row were long, in bounded memory.

One slot for each row modulo ``SLOTS``: with more rows than slots the newer row of two takes the place of the older.
"""

import math
from collections.abc import Sequence

import numpy as np

from staleflow.protocols.wire.tensors import Array

SLOTS = 1 << 20
"""Rows that are remembered at once: 16 bytes each, taken as they are needed."""
KEEP = 0.7
"""Weight that what is known keeps when something newer comes: the last three observations decide."""
_FIRST = 1 << 12
"""Slots at the beginning."""


class LengthHistory:
    """Mean log-length by row."""

    def __init__(self) -> None:
        self._rows = np.full(_FIRST, -1, np.int64)
        self._means = np.zeros(_FIRST, np.float32)
        self._weights = np.zeros(_FIRST, np.float32)
        self.empty = True
        """Nothing was ever added."""

    def of(self, rows: Sequence[int]) -> tuple[Array, Array]:
        """Mean log-length of each row's samples, and its weight in observations; 0 when nothing is remembered."""
        asked = np.asarray(rows, np.int64)
        slots = asked % SLOTS
        slots[slots >= len(self._rows)] = 0
        weights = np.where(self._rows[slots] == asked, self._weights[slots], 0.0)
        return self._means[slots], weights

    def mean(self, row: int) -> float:
        """Of one row; not a number when nothing is remembered."""
        slot = row % SLOTS
        return float(self._means[slot]) if slot < len(self._rows) and self._rows[slot] == row else math.nan

    def add(self, row: int, length: float) -> None:
        """One more observation of a row: the mean logarithm of its samples' tokens."""
        slot = row % SLOTS
        while slot >= len(self._rows):
            self._grow()
        if self._rows[slot] != row:
            self._rows[slot], self._means[slot], self._weights[slot] = row, length, 0.0
        weight = self._weights[slot] * KEEP + 1.0
        self._weights[slot] = weight
        self._means[slot] += (length - self._means[slot]) / weight
        self.empty = False

    def _grow(self) -> None:
        self._rows = np.concatenate((self._rows, np.full_like(self._rows, -1)))
        self._means = np.concatenate((self._means, np.zeros_like(self._means)))
        self._weights = np.concatenate((self._weights, np.zeros_like(self._weights)))
