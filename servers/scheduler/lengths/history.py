"""Observed sample lengths of each prompt row, in bounded memory.

A row uses the slot row modulo ``SLOTS``: with more rows than slots, a newer row overwrites an older one.
"""

import math
from array import array
from collections.abc import Sequence

import numpy as np

from staleflow.protocols.wire.tensors import Array

SLOTS = 1 << 20
"""Maximum number of stored rows, 16 bytes each; the arrays grow on demand."""
KEEP = 0.7
"""Decay of the old weight at each new observation: about the last three observations dominate."""
_FIRST = 1 << 12
"""Initial number of slots."""


class LengthHistory:
    """Mean log-length by row. ``array`` instead of NumPy: rows are written one by one, where NumPy scalars are slow."""

    def __init__(self) -> None:
        self._rows = array("q", [-1]) * _FIRST
        self._means = array("f", [0.0]) * _FIRST
        self._weights = array("f", [0.0]) * _FIRST
        self.empty = True
        """No observation was ever added."""

    def of(self, rows: Sequence[int]) -> tuple[Array, Array]:
        """Return the mean log-length of each row's samples, and its weight in observations; weight 0 if unknown."""
        requested = np.asarray(rows, np.int64)
        slots = requested % SLOTS
        slots[slots >= len(self._rows)] = 0
        stored = np.frombuffer(self._rows, np.int64)[slots] == requested
        weights = np.where(stored, np.frombuffer(self._weights, np.float32)[slots], 0.0)
        return np.frombuffer(self._means, np.float32)[slots], weights

    def mean(self, row: int) -> float:
        """Return the mean log-length of one row; NaN if unknown."""
        slot = row % SLOTS
        return self._means[slot] if slot < len(self._rows) and self._rows[slot] == row else math.nan

    def add(self, row: int, length: float) -> None:
        """Add an observation of a row. ``length``: mean logarithm of its samples' token counts."""
        slot = row % SLOTS
        while slot >= len(self._rows):
            self._grow()
        stored = self._rows[slot] == row
        weight = self._weights[slot] * KEEP + 1.0 if stored else 1.0
        before = self._means[slot] if stored else length
        self._rows[slot], self._weights[slot] = row, weight
        self._means[slot] = before + (length - before) / weight
        self.empty = False

    def _grow(self) -> None:
        size = len(self._rows)
        self._rows.extend(array("q", [-1]) * size)
        self._means.extend(array("f", [0.0]) * size)
        self._weights.extend(array("f", [0.0]) * size)
