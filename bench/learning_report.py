"""From finished runs to a table: what was reached, and at which staleness which correction stops reaching it."""

import statistics
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

Run = dict[str, Any]
Choice = tuple[str, str, int, str]
"""Task, bound, max_staleness, correction."""

CORRECTIONS = ("none", "tis", "decoupled", "masked_is")

LAST = 4
"""Evaluations that a run's final reward is the mean of."""
LEAST_NOISE = 0.03
"""A seed noise smaller than this is chance of few seeds."""


def choice(run: Run) -> Choice:
    key = run["key"]
    return key["task"], key["bound"], key["eta"], key["correction"]


def final(run: Run) -> float:
    """Held-out reward at the end of a run."""
    return statistics.fmean(run["reward"][-LAST:])


def mean_reward(run: Run) -> float:
    """Held-out reward over the whole run (area under its curve): early learning counts."""
    return statistics.fmean((a + b) / 2 for a, b in pairwise(run["reward"]))


def spread(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def grouped(runs: Iterable[Run]) -> dict[Choice, list[Run]]:
    """Runs by choice, all seeds together, in order."""
    found: dict[Choice, list[Run]] = {}
    for run in sorted(runs, key=_order):
        found.setdefault(choice(run), []).append(run)
    return found


def _order(run: Run) -> tuple[Any, ...]:
    task, bound, eta, correction = choice(run)
    return task, eta > 0, bound != "trajectory", eta, CORRECTIONS.index(correction), run["key"]["seed"]


def full_window(run: Run, name: str) -> list[float]:
    """A metric at every step after the window has filled."""
    series: list[float] = run["series"][name]
    return series[run["key"]["eta"] + 1 :] or series


def seconds(run: Run) -> list[float]:
    """Elapsed at the end of each step, as if engine and trainer had a core each: without staleness they take turns,
    with it the slower one counts. Processor seconds of one thread, evaluation left out."""
    elapsed, found = 0.0, list[float]()
    for write, train in zip(run["series"]["time/write"], run["series"]["time/train"], strict=True):
        elapsed += max(write, train) if run["key"]["eta"] else write + train
        found.append(elapsed)
    return found


def floor_of(synchronous: Sequence[Run]) -> float:
    """What must be reached to be as good as synchronous: its final reward less two seed deviations."""
    finals = [final(run) for run in synchronous]
    return statistics.fmean(finals) - 2 * max(LEAST_NOISE, spread(finals))


def breaks(runs: Iterable[Run]) -> dict[tuple[str, str, str], tuple[int, int | None]]:
    """By task, bound and correction: the largest max_staleness up to which all reach the synchronous reward, and the
    first that does not (None: every one that was run does)."""
    choices = grouped(runs)
    found: dict[tuple[str, str, str], tuple[int, int | None]] = {}
    for (task, bound, eta, correction), same in choices.items():
        base = choices.get((task, "trajectory", 0, "none"))
        if not eta or base is None:
            continue
        holds, broken = found.get((task, bound, correction), (0, None))
        reached = statistics.fmean(final(run) for run in same) >= floor_of(base)
        if broken is None:
            found[task, bound, correction] = (eta, None) if reached else (holds, eta)
    return found


def table(runs: Sequence[Run]) -> str:
    """Markdown: one row a choice, then where each correction breaks."""
    lines = [
        "| task | bound | max_staleness | correction | seeds | reward at start | final reward | mean reward "
        "| off-policy mean | max | ESS mean | least | tokens masked by age | by correction | seconds a run |",
        "|" + "---|" * 15,
    ]
    for (task, bound, eta, correction), same in grouped(runs).items():
        finals = [final(run) for run in same]
        lines.append(
            f"| {task} | {bound if eta else '-'} | {eta} | {correction if eta else 'synchronous'} | {len(same)} "
            f"| {_mean(run['reward'][0] for run in same):.2f} | {_mean(finals):.3f} ± {spread(finals):.3f} "
            f"| {_mean(map(mean_reward, same)):.3f} | {_over(same, 'off_policy/mean'):.2f} "
            f"| {max(max(run['series']['off_policy/max']) for run in same):.0f} "
            f"| {_over(same, 'is_weight/ess'):.3f} | {min(min(full_window(run, 'is_weight/ess')) for run in same):.3f} "
            f"| {_over(same, 'masked'):.3f} | {_over(same, 'masked/token'):.3f} "
            f"| {_mean(run['seconds'] for run in same):.0f} |"
        )
    lines += ["", "| task | bound | correction | as good as synchronous up to | breaks at |", "|" + "---|" * 5]
    for (task, bound, correction), (holds, broken) in breaks(runs).items():
        lines.append(f"| {task} | {bound} | {correction} | {holds} | {'-' if broken is None else broken} |")
    return "\n".join(lines)


def _mean(values: Iterable[float]) -> float:
    return statistics.fmean(values)


def _over(runs: Iterable[Run], name: str) -> float:
    return statistics.fmean(value for run in runs for value in full_window(run, name))
