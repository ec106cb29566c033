"""What a decode step costs on each instance, fitted to its own reports while it works.

Between two reports a counter of steps, tokens and busy seconds moves on; so n = tokens / steps samples ran on average,
and a step took busy / steps seconds, with about as many tokens in the cache as the reports say. Of these observations
the newest of each size are kept. The model (``Cost``) bends at the number of samples from which each costs something;
for a given bend it is a sum of three parts that cannot be negative, a problem of least squares, and the best of some
bends is taken.
"""

import numpy as np
from numpy.typing import NDArray

from staleflow.protocols.consistency.ids import WorkerId
from staleflow.protocols.coordination.view import Cost
from staleflow.protocols.wire.messages import InstanceStats

Floats = NDArray[np.float64]

SIZES, EACH, GROWTH = 16, 8, 1.5
"""Observations are kept by their number of samples: so many sizes, so many of each, one size ``GROWTH`` times the one
before. What an instance does at one size does not push out what it did at another."""
OLDEST = 512
"""Observations after which one is no longer believed."""
MIN_STEPS = 8
"""Steps that make an observation."""
ENOUGH = 6
"""Observations that make a first fit."""
EVERY = 16
"""Observations after which it is fitted again."""
AT_ONCE = 2
"""Fits of one cycle: some tenths of a millisecond each."""
OUTLIER = 4.0
"""Observations that are off by more than so many times the median of all are left out: prefill, a pause."""

_SUBSETS = np.array([[bool(n >> bit & 1) for bit in range(3)] for n in range(1, 8)])


class Costs:
    """One fit for each instance; the memory of each is bounded."""

    def __init__(self) -> None:
        self._logs: dict[WorkerId, Log] = {}
        self._due: dict[WorkerId, None] = {}

    def observe(self, worker: WorkerId, stats: InstanceStats) -> None:
        """What a report says."""
        log = self._logs.get(worker)
        if log is None:
            log = self._logs[worker] = Log(stats)
        if log.hear(stats):
            self._due[worker] = None

    def fit(self) -> list[WorkerId]:
        """Fit a few of those that are due; who they were."""
        chosen = [worker for worker, _ in zip(self._due, range(AT_ONCE), strict=False)]
        for worker in chosen:
            del self._due[worker]
            log = self._logs[worker]
            log.cost = fitted(log.observations()) or log.cost
        return chosen

    def of(self, worker: WorkerId) -> Cost | None:
        """Its cost; None before there are enough observations."""
        log = self._logs.get(worker)
        return None if log is None else log.cost

    def forget(self, worker: WorkerId) -> None:
        self._logs.pop(worker, None)
        self._due.pop(worker, None)


class Log:
    """The observations of one instance."""

    __slots__ = ("_before", "_count", "_fresh", "_kept", "_places", "cost")

    def __init__(self, stats: InstanceStats) -> None:
        self.cost: Cost | None = None
        self._before = stats
        self._kept = np.full((SIZES, EACH, 4), -OLDEST, np.float64)
        self._places = [0] * SIZES
        self._count = 0
        self._fresh = 0

    def hear(self, stats: InstanceStats) -> bool:
        """Take in a report; True when it is time for another fit."""
        before = self._before
        steps = stats.steps - before.steps
        if 0 <= steps < MIN_STEPS:
            if not stats.running:
                self._before = stats  # what follows a pause is not of one piece with what was before
            return False
        self._before = stats
        tokens, seconds = stats.generated_tokens - before.generated_tokens, stats.busy_s - before.busy_s
        if steps < 0 or tokens <= 0 or seconds <= 0:
            return False
        self._keep(tokens / steps, (stats.kv_tokens + before.kv_tokens) / 2, seconds / steps)
        return self._count == ENOUGH or self._fresh >= EVERY

    def _keep(self, samples: float, kv: float, seconds: float) -> None:
        size = min(SIZES - 1, max(0, int(np.log(max(samples, 1.0)) / np.log(GROWTH))))
        self._kept[size, self._places[size] % EACH] = samples, kv, seconds, self._count
        self._places[size] += 1
        self._count += 1
        self._fresh += 1

    def observations(self) -> Floats:
        """[n, 3]: samples, tokens in the cache, seconds of a step."""
        self._fresh = 0
        kept = self._kept.reshape(-1, 4)
        return kept[kept[:, 3] > self._count - OLDEST, :3]


def fitted(seen: Floats) -> Cost | None:
    """The cost with the least relative squares over ``seen`` [n, 3], without what is far off; None when they are too
    few."""
    if len(seen) < ENOUGH:
        return None
    cost = _fit(seen)
    off = np.abs(np.array([cost.step_s(n, kv) for n, kv, _ in seen]) / seen[:, 2] - 1.0)
    kept = seen[off <= OUTLIER * max(float(np.median(off)), 0.01)]
    return _fit(kept) if ENOUGH <= len(kept) < len(seen) else cost


def _fit(seen: Floats) -> Cost:
    """Of seconds ~ k1 kv + k3 max(n, bend) + k4 the best one: over some bends first, then over some near the best."""
    bends = np.unique(np.concatenate(([0.0], np.quantile(seen[:, 0], (0.1, 0.25, 0.4, 0.55, 0.7, 0.85, 1.0)))))
    _, best = _best(seen, bends)
    near: Floats = np.linspace(float(bends[max(best - 1, 0)]), float(bends[min(best + 1, len(bends) - 1)]), 9)
    (k1, k3, k4), best = _best(seen, near)
    return Cost(k1=k1, k2=k3 * float(near[best]), k3=k3, k4=k4)


def _best(seen: Floats, bends: Floats) -> tuple[list[float], int]:
    """The weights k1, k3 and k4 with the best bend, and its place."""
    samples, kv, seconds = seen.T
    columns = np.stack([np.stack([kv, np.maximum(samples, bend), np.ones_like(kv)]) for bend in bends]) / seconds
    scale = np.maximum(columns.max(axis=2, keepdims=True), 1e-30)
    weights, squares = _not_negative(columns / scale)
    best = int(np.argmin(squares))
    return (weights[best] / scale[best, :, 0]).tolist(), best


def _not_negative(columns: Floats) -> tuple[Floats, Floats]:
    """For each [3, n] of ``columns``: the weights >= 0 whose sum of columns is nearest to 1, and the squares left.

    With three columns there are seven sets of those that are not zero: the best one without a negative weight is it.
    """
    products = columns @ columns.transpose(0, 2, 1)
    aims = columns.sum(axis=2)
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
