# pyright: basic, reportMissingImports=false
"""Online prediction of log-lengths from prompt features, for prompts without observations: linear regression by SGD.

Each training step uses new groups and a sample of earlier ones (experience replay), so that a phase in which all
lengths are alike does not erase the others. Features are standardized and clipped at ``MAX_DEVIATIONS`` deviations.
"""

from collections.abc import Sequence

import numpy as np
from sklearn.linear_model import SGDRegressor
from sklearn.preprocessing import StandardScaler

from staleflow.protocols.wire.messages import FEATURES
from staleflow.protocols.wire.tensors import Array

MIN_GROUPS = 32
"""Minimum number of groups before the first training step."""
MIN_NEW_GROUPS = 16
"""Minimum number of new groups for a training step."""
MAX_NEW_GROUPS = 256
"""Maximum number of new groups in a training step."""
NUM_REPLAYED = 512
"""Number of replayed groups in a training step."""
MAX_DEVIATIONS = 3.0
"""Features are clipped at this many standard deviations."""


class LengthModel:
    """Length model with the features of the last ``remembered`` described rows and as many training groups."""

    def __init__(self, *, remembered: int) -> None:
        self._scaler = StandardScaler()
        self._regressor = SGDRegressor(
            loss="huber", epsilon=1.0, alpha=1e-3, learning_rate="invscaling", eta0=0.02, power_t=0.25, random_state=0
        )
        self._slots: dict[int, int] = {}
        self._rows = np.full(remembered, -1, np.int64)
        self._features = np.zeros((remembered, FEATURES), np.float16)
        self._described = 0
        self._groups = np.zeros((remembered, FEATURES), np.float16)
        self._lengths = np.zeros(remembered, np.float32)
        self._num_groups = self._num_learned = 0
        self._offset = 0.0
        """Mean log-length of the first training step; the regressor learns the difference from it."""
        self._mean, self._scale, self._slope = np.zeros(FEATURES), np.ones(FEATURES), np.zeros(FEATURES)
        self._level = 0.0
        self._random = np.random.default_rng(0)

    @property
    def num_described(self) -> int:
        """Number of rows with features."""
        return len(self._slots)

    def features(self, row: int) -> Array | None:
        """Return the features of a row; None if they were never stored or have been overwritten."""
        slot = self._slots.get(row)
        return None if slot is None else self._features[slot]

    def describe(self, rows: Sequence[int], features: Array) -> None:
        """Store the features of prompt rows, [len(rows), FEATURES]."""
        for row, values in zip(rows, features, strict=True):
            slot = self._slots.get(row)
            if slot is None:
                slot = self._described % len(self._rows)
                self._described += 1
                self._slots.pop(int(self._rows[slot]), None)
                self._slots[row] = slot
                self._rows[slot] = row
            self._features[slot] = values

    def add(self, features: Array, length: float) -> None:
        """Add a training group: the features of its prompt and its mean log-length."""
        slot = self._num_groups % len(self._lengths)
        self._groups[slot] = features
        self._lengths[slot] = length
        self._num_groups += 1

    def learn(self) -> None:
        """Run a training step if there are enough new groups; takes about a millisecond."""
        new = min(self._num_groups - self._num_learned, len(self._lengths))
        if new < MIN_NEW_GROUPS or self._num_groups < MIN_GROUPS:
            return
        have = min(self._num_groups, len(self._lengths))
        fresh = np.arange(self._num_groups - min(new, MAX_NEW_GROUPS), self._num_groups) % len(self._lengths)
        chosen = np.concatenate((self._random.integers(0, have, NUM_REPLAYED), fresh))
        lengths = self._lengths[chosen].astype(np.float64)
        self._scaler.partial_fit(self._groups[fresh].astype(np.float64))
        self._mean, self._scale = np.asarray(self._scaler.mean_), np.asarray(self._scaler.scale_)
        if not self._num_learned:
            self._offset = float(lengths.mean())
        self._regressor.partial_fit(self._scaled(self._groups[chosen]), lengths - self._offset)
        self._slope = np.asarray(self._regressor.coef_)
        self._level = self._offset + float(np.asarray(self._regressor.intercept_)[0])
        self._num_learned = self._num_groups

    def of(self, rows: Sequence[int]) -> Array:
        """Return expected log-lengths, [len(rows)]; NaN for rows without features, and before the first training."""
        expected = np.full(len(rows), np.nan)
        if not self._num_learned:
            return expected
        slots = np.array([self._slots.get(row, -1) for row in rows], dtype=np.int64)
        described = slots >= 0
        expected[described] = self._scaled(self._features[slots[described]]) @ self._slope + self._level
        return expected

    def _scaled(self, features: Array) -> Array:
        return np.clip((features.astype(np.float64) - self._mean) / self._scale, -MAX_DEVIATIONS, MAX_DEVIATIONS)
