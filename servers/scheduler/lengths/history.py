"""What the samples of each prompt row were long, in bounded memory.

One slot for each row modulo ``SLOTS``: with more rows than slots the newer row of two takes the place of the older.
"""

import math
from array import array
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
    """Mean log-length by row. Read by the thousand and written one by one, where NumPy's scalars would be slow."""

    def __init__(self) -> None:
        self._rows = array("q", [-1]) * _FIRST
        self._means = array("f", [0.0]) * _FIRST
        self._weights = array("f", [0.0]) * _FIRST
        self.empty = True
        """Nothing was ever added."""

    def of(self, rows: Sequence[int]) -> tuple[Array, Array]:
        """Mean log-length of each row's samples, and its weight in observations; 0 when nothing is remembered."""
        asked = np.asarray(rows, np.int64)
        slots = asked % SLOTS
        slots[slots >= len(self._rows)] = 0
        known = np.frombuffer(self._rows, np.int64)[slots] == asked
        weights = np.where(known, np.frombuffer(self._weights, np.float32)[slots], 0.0)
        return np.frombuffer(self._means, np.float32)[slots], weights

    def mean(self, row: int) -> float:
        """Of one row; not a number when nothing is remembered."""
        slot = row % SLOTS
        return self._means[slot] if slot < len(self._rows) and self._rows[slot] == row else math.nan

    def add(self, row: int, length: float) -> None:
        """One more observation of a row: the mean logarithm of its samples' tokens."""
        slot = row % SLOTS
        while slot >= len(self._rows):
            self._grow()
        known = self._rows[slot] == row
        weight = self._weights[slot] * KEEP + 1.0 if known else 1.0
        before = self._means[slot] if known else length
        self._rows[slot], self._weights[slot] = row, weight
        self._means[slot] = before + (length - before) / weight
        self.empty = False

    def _grow(self) -> None:
        size = len(self._rows)
        self._rows.extend(array("q", [-1]) * size)
        self._means.extend(array("f", [0.0]) * size)
        self._weights.extend(array("f", [0.0]) * size)
