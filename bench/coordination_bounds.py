"""Limits of speed and freshness under a bound: ``docs/consistency.md``, "How fast a bound can be", in numbers.

All limits are computed from the lengths that a simulation draws. ``early`` selects the moment of publication: together
with the batch of the step, as in the simulator of the StaleFlow authors, instead of after the step, as in reality.
"""

import numpy as np
from numpy.typing import NDArray

from staleflow.configs.schema import Config
from staleflow.servers.scheduler.prompts.queue import PromptQueue
from staleflow.sim.cost import StepCost
from staleflow.sim.workload import Workload

Floats = NDArray[np.float64]
PHASES = 64
"""Number of moments of a step at which a trajectory may begin; the search takes the best one."""


def token_s(config: Config) -> float:
    """Minimum seconds of a token: for a sample that runs alone, with an empty cache."""
    return StepCost.of(config.rollout.simulated).steps_s(1, 1, 0)


def drawn(config: Config, groups: int) -> Floats:
    """[groups, samples]: lengths of the first groups of the prompt stream, the n-th under lease n, as drawn by a run
    that deals them in this order."""
    workload = Workload(config)
    deck = PromptQueue(seed=config.seed, epochs=config.prompts.epochs)
    deck.set_source(workload.rows, "simulated")
    result = [workload.samples(group, lease) for lease, group in enumerate(deck.upcoming(groups), start=1)]
    return np.array([[sample.length for sample in samples] for samples in result], np.float64)


def batches(lengths: Floats, batch_size: int, max_staleness: int) -> Floats:
    """[steps]: the longest of each ``batch_size`` consecutive groups. The groups of the first ``max_staleness`` + 1
    batches all begin with version 0, and train in the order in which they end."""
    steps = len(lengths) // batch_size
    longest = lengths[: steps * batch_size].max(axis=1)
    longest[: (max_staleness + 1) * batch_size].sort()
    slowest: Floats = longest.reshape(steps, batch_size).max(axis=1)
    return slowest


def clustered(lengths: Floats, block: int) -> Floats:
    """The same groups, each whole block ordered by its longest sample, alternately longest first and longest last."""
    order = [
        first + np.argsort(lengths[first : first + block].max(axis=1), kind="stable")[:: 1 if turn % 2 else -1]
        for turn, first in enumerate(range(0, len(lengths), block))
    ]
    return lengths[np.concatenate(order)]


def batch_bound(longest: Floats, token_s: float, train_s: float, max_staleness: int, *, early: bool) -> float:
    """Steps a minute that no admission of one batch per version can exceed: ``60 (eta + 1) / (E[longest] t + T)``,
    without T when versions are early, and the trainer's own limit."""
    chain_s = float(longest.mean()) * token_s + (0.0 if early else train_s)
    return 60.0 / max(train_s, chain_s / (max_staleness + 1))


def batch_optimum(longest: Floats, token_s: float, train_s: float, max_staleness: int, *, early: bool) -> float:
    """Steps a minute of the best run in which version k admits the batch whose ``longest`` is the k-th.

    ``t[k+1] = max(t[k] + T, t[k-eta] + M[k] t)``, plus T in the second term unless versions are early. As in
    ``sim.measure``, the first and the last eta + 1 steps do not count.
    """
    out = [0.0]
    for step, tokens in enumerate(longest.tolist()):
        began = out[max(step - max_staleness, 0)]
        out.append(max(out[step] + train_s, began + tokens * token_s + (0.0 if early else train_s)))
    skip = min(max_staleness + 1, (len(longest) - 1) // 3)
    return 60.0 * (len(longest) - 2 * skip) / (out[len(longest) - skip] - out[skip])


def window_s(step_s: float, train_s: float, max_staleness: int, *, early: bool) -> float:
    """Seconds from the version that is just fresh enough for a batch to the last moment at which the batch is fixed."""
    return (max_staleness + 1) * step_s - (0.0 if early else train_s)


def masked_floor(lengths: Floats, token_s: float, window_s: float) -> float:
    """Minimum share of masked tokens: the part of each trajectory beyond the window, ``E[(L - W)+] / E[L]``."""
    tokens = lengths.ravel()
    return float(np.maximum(tokens - window_s / token_s, 0.0).sum() / tokens.sum())


def masked_floor_unknown(lengths: Floats, token_s: float, window_s: float, step_s: float) -> float:
    """The same for unknown lengths and a trainer that never waits: all trajectories begin at the same, best, moment of
    a step, and a finished one waits for the next batch."""
    seconds = lengths.ravel() * token_s
    floors: list[float] = []
    for begin_s in np.arange(PHASES) * (step_s / PHASES):
        sealed_s = np.ceil((begin_s + seconds) / step_s) * step_s - begin_s
        floors.append(float(np.clip(sealed_s - window_s, 0.0, seconds).sum() / seconds.sum()))
    return min(floors)


def freshest(lengths: Floats, token_s: float, train_s: float, *, early: bool) -> float:
    """Minimum mean staleness of a trainer that never waits: each group begins with the version just published, and
    trains in the first step that begins after its end, ``E[ceil(L t / T)]``; one less when versions are early."""
    steps = np.ceil(lengths.max(axis=1) * token_s / train_s)
    return float(np.maximum(steps - early, 0.0).mean())


def volume_limit(lengths: Floats, token_s: float, batches: float) -> float:
    """Steps a minute that no run can exceed with at most that many batches of groups under way (Little's law)."""
    return 60.0 * batches / (float(lengths.max(axis=1).mean()) * token_s)
