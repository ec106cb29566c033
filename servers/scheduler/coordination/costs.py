"""Cost of a decode step on each instance, fitted online to the reports of the instance.

Each report has counters of steps, tokens and busy seconds. Between two reports, n = tokens / steps samples ran on
average, and a step took busy / steps seconds with about the reported number of tokens in the cache. The newest
observations of each size are kept. The model (``Cost``) has a bend: the number of samples above which each additional
sample costs time. For a fixed bend, the model is a non-negative least-squares problem with three weights; the fit tries
several bends and takes the best.
"""

import numpy as np
from numpy.typing import NDArray

from staleflow.protocols.consistency.ids import WorkerId
from staleflow.protocols.coordination.view import Cost
from staleflow.protocols.wire.messages import InstanceStats

Floats = NDArray[np.float64]

SIZES, EACH, GROWTH = 16, 8, 1.5
"""Number of size buckets by number of samples, observations in each, and the ratio of two bucket sizes. With buckets,
observations at one size do not displace those at another."""
MAX_AGE = 512
"""Age in observations at which an observation is discarded."""
MIN_STEPS = 8
"""Minimum number of steps of an observation."""
MIN_OBSERVATIONS = 6
"""Minimum number of observations for a fit."""
FIT_INTERVAL = 16
"""Number of new observations between two fits."""
MAX_FITS = 2
"""Maximum number of fits in one cycle: each takes some tenths of a millisecond."""
OUTLIER = 4.0
"""Observations with an error above this multiple of the median error are ignored: a prefill or a pause."""

_SUBSETS = np.array([[bool(n >> bit & 1) for bit in range(3)] for n in range(1, 8)])


class Costs:
    """Cost models by instance, each with bounded memory."""

    def __init__(self) -> None:
        self._logs: dict[WorkerId, ObservationLog] = {}
        self._due: dict[WorkerId, None] = {}

    def observe(self, worker: WorkerId, stats: InstanceStats) -> None:
        """Add a report; mark the instance for a fit if one is due."""
        log = self._logs.get(worker)
        if log is None:
            log = self._logs[worker] = ObservationLog(stats)
        if log.add(stats):
            self._due[worker] = None

    def fit(self) -> list[WorkerId]:
        """Fit at most ``MAX_FITS`` models that are due, and return their instances."""
        chosen = [worker for worker, _ in zip(self._due, range(MAX_FITS), strict=False)]
        for worker in chosen:
            del self._due[worker]
            log = self._logs[worker]
            log.cost = fitted(log.observations()) or log.cost
        return chosen

    def of(self, worker: WorkerId) -> Cost | None:
        """Return the cost model of an instance; None before its first fit."""
        log = self._logs.get(worker)
        return None if log is None else log.cost

    def forget(self, worker: WorkerId) -> None:
        self._logs.pop(worker, None)
        self._due.pop(worker, None)


class ObservationLog:
    """The observations of one instance."""

    __slots__ = ("_before", "_count", "_fresh", "_kept", "_places", "cost")

    def __init__(self, stats: InstanceStats) -> None:
        self.cost: Cost | None = None
        self._before = stats
        self._kept = np.full((SIZES, EACH, 4), -MAX_AGE, np.float64)
        self._places = [0] * SIZES
        self._count = 0
        self._fresh = 0

    def add(self, stats: InstanceStats) -> bool:
        """Add a report; return True if a fit is due."""
        before = self._before
        steps = stats.steps - before.steps
        if 0 <= steps < MIN_STEPS:
            if not stats.running:
                self._before = stats  # idle: an observation that spans a pause would mix two loads
            return False
        self._before = stats
        tokens, seconds = stats.generated_tokens - before.generated_tokens, stats.busy_s - before.busy_s
        if steps < 0 or tokens <= 0 or seconds <= 0:
            return False
        self._keep(tokens / steps, (stats.kv_tokens + before.kv_tokens) / 2, seconds / steps)
        return self._count == MIN_OBSERVATIONS or self._fresh >= FIT_INTERVAL

    def _keep(self, samples: float, kv: float, seconds: float) -> None:
        size = min(SIZES - 1, max(0, int(np.log(max(samples, 1.0)) / np.log(GROWTH))))
        self._kept[size, self._places[size] % EACH] = samples, kv, seconds, self._count
        self._places[size] += 1
        self._count += 1
        self._fresh += 1

    def observations(self) -> Floats:
        """Return the observations, [n, 3]: samples, tokens in the cache, seconds of a step."""
        self._fresh = 0
        kept = self._kept.reshape(-1, 4)
        return kept[kept[:, 3] > self._count - MAX_AGE, :3]


def fitted(observations: Floats) -> Cost | None:
    """Fit the cost with the smallest relative squared error over ``observations`` [n, 3], without outliers.

    Return None if there are fewer than ``MIN_OBSERVATIONS`` observations.
    """
    if len(observations) < MIN_OBSERVATIONS:
        return None
    cost = _fit(observations)
    off = np.abs(np.array([cost.step_s(n, kv) for n, kv, _ in observations]) / observations[:, 2] - 1.0)
    kept = observations[off <= OUTLIER * max(float(np.median(off)), 0.01)]
    return _fit(kept) if MIN_OBSERVATIONS <= len(kept) < len(observations) else cost


def _fit(observations: Floats) -> Cost:
    """Fit seconds ~ k1 kv + k3 max(n, bend) + k4: search a coarse grid of bends, then a fine grid around the best."""
    bends = np.unique(np.concatenate(([0.0], np.quantile(observations[:, 0], (0.1, 0.25, 0.4, 0.55, 0.7, 0.85, 1.0)))))
    _, best = _best(observations, bends)
    near: Floats = np.linspace(float(bends[max(best - 1, 0)]), float(bends[min(best + 1, len(bends) - 1)]), 9)
    (k1, k3, k4), best = _best(observations, near)
    return Cost(k1=k1, k2=k3 * float(near[best]), k3=k3, k4=k4)


def _best(observations: Floats, bends: Floats) -> tuple[list[float], int]:
    """Return the weights k1, k3 and k4 at the best bend, and the index of that bend."""
    samples, kv, seconds = observations.T
    columns = np.stack([np.stack([kv, np.maximum(samples, bend), np.ones_like(kv)]) for bend in bends]) / seconds
    scale = np.maximum(columns.max(axis=2, keepdims=True), 1e-30)
    weights, squares = _not_negative(columns / scale)
    best = int(np.argmin(squares))
    return (weights[best] / scale[best, :, 0]).tolist(), best


def _not_negative(columns: Floats) -> tuple[Floats, Floats]:
    """Solve a non-negative least-squares problem for each [3, n] of ``columns``, with target 1.

    Return the weights and the squared residuals. With three columns there are only seven non-empty subsets of active
    columns: solve all of them, and take the best solution without a negative weight.
    """
    products = columns @ columns.transpose(0, 2, 1)
    aims = columns.sum(axis=2)
    # Inactive columns become unit rows; the small diagonal keeps the systems of collinear columns solvable.
    both = _SUBSETS[:, :, None] & _SUBSETS[:, None, :]
    systems = np.where(both, products[:, None], np.eye(3) * (1.0 - both)) + 1e-9 * np.eye(3)
    solved = np.linalg.solve(systems, np.where(_SUBSETS, aims[:, None], 0.0)[..., None])
    weights = solved[..., 0].astype(np.float64)
    left = (
        columns.shape[2]
        - 2 * np.einsum("csk,ck->cs", weights, aims)
        + np.einsum("csk,ckl,csl->cs", weights, products, weights)
    )
    squares: Floats = np.where((weights >= 0.0).all(axis=2), left, np.inf)
    best = squares.argmin(axis=1)
    rows = np.arange(len(columns))
    return weights[rows, best], squares[rows, best]
