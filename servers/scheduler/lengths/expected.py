"""Expected number of tokens of a prompt's samples.

- Observed lengths of a prompt row come first. A model of the prompt's features predicts rows that were never observed,
  and counts as one more observation of the others.
- Everything is computed in logarithms, because lengths differ by factors. The expectation is 0 for a row without
  observations whose features are missing or arrive too late.
- Nothing in this module blocks: features arrive asynchronously (``prompt_features``), and training steps of the model
  are short and run between messages.
"""

import math
from array import array
from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING, Literal

import numpy as np

from staleflow.configs.errors import ConfigError
from staleflow.configs.loading.extras import install
from staleflow.protocols.consistency.ids import GroupId
from staleflow.protocols.wire.tensors import Array
from staleflow.servers.scheduler.lengths.log import CHUNK, TABLE, LengthLog, Observed
from staleflow.store.base import Read, Write

if TYPE_CHECKING:
    from staleflow.servers.scheduler.lengths.model import LengthModel

Ranker = Literal["none", "history", "learned"]

MAX_JUDGED = 512
"""Groups that the ranking quality is computed from, spread over a longer time: with clustered lengths, all recent
groups are alike."""


SLOTS = 1 << 20
"""Maximum number of stored rows, 16 bytes each; the arrays grow on demand."""
KEEP = 0.7
"""Decay of the old weight at each new observation: about the last three observations dominate."""
_FIRST = 1 << 12
"""Initial number of slots."""


class LengthHistory:
    """Mean log-length of each prompt row's samples, in bounded memory.

    A row uses the slot row modulo ``SLOTS``: with more rows than slots, a newer row overwrites an older one. ``array``
    instead of NumPy: rows are written one by one, where NumPy scalars are slow.
    """

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


class Lengths:
    """Expected lengths of one run. The prompt queue sets ``rows`` and calls ``save``."""

    def __init__(self, ranker: Ranker = "none", *, ahead: int = 1024) -> None:
        """``ahead``: number of upcoming prompts whose length may be requested."""
        self._ranks = ranker != "none"
        self._history = LengthHistory()
        self._log = LengthLog()
        self.rows = 0
        """Rows of the prompt source."""
        self._pairs: deque[tuple[float, float]] = deque(maxlen=max(4 * ahead, 4096))
        """(Expected before the observation, observed) mean log-lengths of the last groups."""
        self._observed = 0
        self._judged = (0, 0.0)
        """Number of observed groups at the last computation of the quality, and its tau."""
        self._remembered = max(4 * ahead, 8192)
        """Maximum number of prompts and groups in the model's memory."""
        self._model: LengthModel | None = None
        if ranker == "learned":
            self._model = _length_model(self._remembered)

    def load(self, txn: Read) -> None:
        """Load the observations of earlier incarnations; no-op if observations exist, as after a failed commit."""
        if not self._ranks or not self._history.empty:
            return
        old = txn.count(TABLE) * CHUNK - self._remembered
        for number, observed in enumerate(self._log.load(txn), start=1):
            self._take(observed if number > old else observed._replace(features=None))
            if self._model is not None and number > old and number % CHUNK == 0:
                self._model.learn()

    @property
    def changed(self) -> bool:
        """True if unsaved changes exist."""
        return self._log.changed

    def save(self, txn: Write) -> None:
        """Write the full chunks of observations since the last call of ``saved``."""
        self._log.save(txn)

    def saved(self) -> None:
        """Note that the changes of ``save`` are durable."""
        self._log.saved()

    def expected(self, group: GroupId) -> float:
        """Return the expected tokens of one sample of ``group``; 0.0 if unknown."""
        return self.expected_of((group,))[0]

    def expected_of(self, groups: Sequence[GroupId]) -> list[float]:
        """Return ``expected`` of each group."""
        if not self._ranks or not self.rows or (self._model is None and self._history.empty):
            return [0.0] * len(groups)
        logarithms = self._expected([group % self.rows for group in groups])
        expected: list[float] = np.where(np.isnan(logarithms), 0.0, np.exp(logarithms)).tolist()
        return expected

    def _expected(self, rows: Sequence[int]) -> Array:
        means, weights = self._history.of(rows)
        history = np.where(weights > 0, means, np.nan)
        if self._model is None:
            return history
        modelled = self._model.of(rows)
        both = (weights * means + modelled) / (weights + 1.0)
        return np.where(weights == 0, modelled, np.where(np.isnan(modelled), history, both))

    def observe(self, group: GroupId, samples: Sequence[int], *, truncated: bool) -> None:
        """Record the sample lengths of a pushed group. A truncated group is ignored unless it exceeds the expectation:
        otherwise its true length is unknown."""
        if not self._ranks or not self.rows or not samples:
            return
        row = group % self.rows
        length = sum([math.log(tokens or 1) for tokens in samples]) / len(samples)
        expected = self._history.mean(row) if self._model is None else float(self._expected((row,))[0])
        if truncated and not length > expected:
            return
        if not truncated and not math.isnan(expected):
            self._pairs.append((expected, length))
        observed = Observed(row, length, None if self._model is None else self._model.features(row))
        self._observed += 1
        self._take(observed)
        self._log.add(observed)

    def _take(self, observed: Observed) -> None:
        self._history.add(observed.row, observed.length)
        if self._model is not None and observed.features is not None:
            self._model.add(observed.features, observed.length)

    # --- the model of features ---------------------------------------------------------------------------------

    @property
    def learns(self) -> bool:
        """True if a model uses features."""
        return self._model is not None

    @property
    def num_described(self) -> int:
        """Number of rows with features."""
        return 0 if self._model is None else self._model.num_described

    def described(self, row: int) -> bool:
        """Return whether the features of a row are known."""
        return self._model is not None and self._model.features(row) is not None

    def describe(self, rows: Sequence[int], features: Array) -> None:
        """Store features of prompt rows: float16 [len(rows), FEATURES], finite."""
        if self._model is not None:
            self._model.describe(rows, features)

    def learn(self) -> None:
        """Run one short training step of the model if enough new groups exist."""
        if self._model is not None:
            self._model.learn()

    # --- ranking quality -----------------------------------------------------------------------------------------

    def quality(self) -> dict[str, float]:
        """Return Kendall's tau of expected and observed lengths (1: perfect, 0: chance), and the number of groups."""
        if self._judged[0] != self._observed:
            step = len(self._pairs) // MAX_JUDGED + 1
            self._judged = (self._observed, kendall_tau(list(islice(self._pairs, 0, None, step))))
        return {"length/ranker_tau": self._judged[1], "length/ranker_n": len(self._pairs)}


def _length_model(remembered: int) -> "LengthModel":
    """Build the model. Imported lazily: scikit-learn takes two seconds and 100 MB."""
    try:
        from staleflow.servers.scheduler.lengths.model import LengthModel
    except ImportError as error:
        wanted = f"the package {error.name} is not installed: {install('ranker')}"
        raise ConfigError("coordination.ranker", "learned", wanted) from error
    return LengthModel(remembered=remembered)


def kendall_tau(pairs: Sequence[tuple[float, float]]) -> float:
    """Return Kendall's tau-b of (x, y): concordant minus discordant pairs, over the pairs that are not tied.

    0.0 if x or y is constant. Time and memory are quadratic in ``len(pairs)``.
    """
    if len(pairs) < 2:
        return 0.0
    x, y = np.array(pairs).T
    x_above, y_above = x[:, None] > x, y[:, None] > y
    differ = math.sqrt(np.count_nonzero(x_above) * np.count_nonzero(y_above))
    same, opposite = np.count_nonzero(x_above & y_above), np.count_nonzero(x_above & y_above.T)
    return float(same - opposite) / differ if differ else 0.0
