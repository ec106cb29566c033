"""How many tokens a prompt's samples are expected to have.

- What a prompt row had before comes first; a model of the prompt's features stands in for rows never seen, and counts
  as one more observation of the others.
- Everything is in logarithms: lengths differ by factors. What nothing is known of is 0, and so is what came too late.
- Nothing here waits: features come by themselves (``describing``), lessons are short and taken between messages.
"""

import math
from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING, Literal

import numpy as np

from staleflow.configs.errors import ConfigError
from staleflow.configs.loading.extras import install
from staleflow.protocols.consistency.ids import GroupId
from staleflow.protocols.wire.tensors import Array
from staleflow.servers.scheduler.lengths.history import LengthHistory
from staleflow.servers.scheduler.lengths.log import CHUNK, TABLE, LengthLog, Observed
from staleflow.store.base import Read, Write

if TYPE_CHECKING:
    from staleflow.servers.scheduler.lengths.model import LengthModel

Ranker = Literal["none", "history", "learned"]

JUDGED = 512
"""Groups over which the ranking is judged, out of a longer time: where lengths are clustered, all of late are alike."""


class Lengths:
    """Expected lengths of one run. The deck keeps ``rows`` and stores what is to be stored."""

    def __init__(self, ranker: Ranker = "none", *, ahead: int = 1024) -> None:
        """``ahead``: prompts that may be asked about before they are dealt."""
        self._ranks = ranker != "none"
        self._history = LengthHistory()
        self._log = LengthLog()
        self.rows = 0
        """Rows of the prompt source."""
        self._pairs: deque[tuple[float, float]] = deque(maxlen=max(4 * ahead, 4096))
        """Expected before it was seen, and seen: mean log-lengths of the last groups."""
        self._observed = 0
        self._judged = (0, 0.0)
        """Groups observed when the ranking was judged last, and tau."""
        self._remembered = max(4 * ahead, 8192)
        """Prompts and groups that the model knows at once."""
        self._model: LengthModel | None = None
        if ranker == "learned":
            self._model = _length_model(self._remembered)

    def load(self, txn: Read) -> None:
        """Take up what earlier incarnations observed; nothing when there is something already."""
        if not self._ranks or not self._history.empty:
            return
        old = txn.count(TABLE) * CHUNK - self._remembered
        for number, observed in enumerate(self._log.load(txn), start=1):
            self._take(observed if number > old else observed._replace(features=None))
            if self._model is not None and number > old and number % CHUNK == 0:
                self._model.learn()

    @property
    def changed(self) -> bool:
        """Whether there is something to save."""
        return self._log.changed

    def save(self, txn: Write) -> None:
        """Write what was observed since the last ``saved``, by the chunk."""
        self._log.save(txn)

    def saved(self) -> None:
        """What was saved is durable."""
        self._log.saved()

    def expected(self, group: GroupId) -> float:
        """Tokens of one sample of ``group``; 0.0 when nothing is known of its prompt."""
        return self.expected_of((group,))[0]

    def expected_of(self, groups: Sequence[GroupId]) -> list[float]:
        """``expected`` of each, in one go."""
        if not self._ranks or not self.rows or (self._model is None and self._history.empty):
            return [0.0] * len(groups)
        logarithms = self._expected([group % self.rows for group in groups])
        expected: list[float] = np.where(np.isnan(logarithms), 0.0, np.exp(logarithms)).tolist()
        return expected

    def _expected(self, rows: Sequence[int]) -> Array:
        means, weights = self._history.of(rows)
        known = np.where(weights > 0, means, np.nan)
        if self._model is None:
            return known
        modelled = self._model.of(rows)
        both = (weights * means + modelled) / (weights + 1.0)
        return np.where(weights == 0, modelled, np.where(np.isnan(modelled), known, both))

    def observe(self, group: GroupId, samples: Sequence[int], *, truncated: bool) -> None:
        """``group`` was pushed with samples of these lengths. One that was cut off says nothing, unless it was longer
        than expected all the same."""
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
        """Whether features are of any use."""
        return self._model is not None

    @property
    def num_described(self) -> int:
        """Rows whose features are known."""
        return 0 if self._model is None else self._model.num_described

    def described(self, row: int) -> bool:
        """Whether the features of a row are known."""
        return self._model is not None and self._model.features(row) is not None

    def describe(self, rows: Sequence[int], features: Array) -> None:
        """Features of prompt rows, float16 [len(rows), FEATURES] and finite."""
        if self._model is not None:
            self._model.describe(rows, features)

    def learn(self) -> None:
        """A short lesson, when there is something to learn from."""
        if self._model is not None:
            self._model.learn()

    # --- how well it ranks ---------------------------------------------------------------------------------------

    def quality(self) -> dict[str, float]:
        """Kendall's tau between expected and seen, and of how many groups: 1 ranks all pairs right, 0 is chance."""
        if self._judged[0] != self._observed:
            step = len(self._pairs) // JUDGED + 1
            self._judged = (self._observed, kendall_tau(list(islice(self._pairs, 0, None, step))))
        return {"length/ranker_tau": self._judged[1], "length/ranker_n": len(self._pairs)}


def _length_model(remembered: int) -> "LengthModel":
    """scikit-learn takes two seconds and 100 MB: it is imported only when lengths are to be learned."""
    try:
        from staleflow.servers.scheduler.lengths.model import LengthModel
    except ImportError as error:
        wanted = f"the package {error.name} is not installed: {install('ranker')}"
        raise ConfigError("coordination.ranker", "learned", wanted) from error
    return LengthModel(remembered=remembered)


def kendall_tau(pairs: Sequence[tuple[float, float]]) -> float:
    """Kendall's tau-b of (x, y): pairs in the same order minus pairs in opposite order, over those that differ.

    0.0 where one of the two is the same everywhere. Takes the square of ``len(pairs)``.
    """
    if len(pairs) < 2:
        return 0.0
    x, y = np.array(pairs).T
    x_above, y_above = x[:, None] > x, y[:, None] > y
    differ = math.sqrt(np.count_nonzero(x_above) * np.count_nonzero(y_above))
    same, opposite = np.count_nonzero(x_above & y_above), np.count_nonzero(x_above & y_above.T)
    return float(same - opposite) / differ if differ else 0.0
