"""Tables of finished runs: the rewards, and the staleness at which each correction stops reaching them."""

import statistics
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

Run = dict[str, Any]
Choice = tuple[str, float, str, int, str]
"""Task, learning rate, bound, max_staleness, correction."""

CORRECTIONS = ("none", "tis", "decoupled", "masked_is")

LAST = 4
"""Number of evaluations whose mean is a run's final reward."""
NOISE = 0.06
"""A smaller mean loss over the seeds is noise: seeds of one choice differ by 0.04 (their standard deviation, measured
at a learning rate of 5e-4, with a correction, max_staleness up to 2)."""


def choice(run: Run) -> Choice:
    key = run["key"]
    return key["task"], key["lr"], key["bound"], key["eta"], key["correction"]


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
    result: dict[Choice, list[Run]] = {}
    for run in sorted(runs, key=_order):
        result.setdefault(choice(run), []).append(run)
    return result


def _order(run: Run) -> tuple[Any, ...]:
    task, lr, bound, eta, correction = choice(run)
    return task, -lr, eta > 0, bound != "trajectory", eta, CORRECTIONS.index(correction), run["key"]["seed"]


def full_window(run: Run, name: str) -> list[float]:
    """A metric at every step after the window has filled."""
    series: list[float] = run["series"][name]
    return series[run["key"]["eta"] + 1 :] or series


def seconds(run: Run) -> list[float]:
    """Elapsed seconds at the end of each step, as if engine and trainer had a core each: without staleness they take
    turns, with it the slower one counts. CPU seconds of one thread, without evaluations."""
    elapsed, result = 0.0, list[float]()
    for write, train in zip(run["series"]["time/write"], run["series"]["time/train"], strict=True):
        elapsed += max(write, train) if run["key"]["eta"] else write + train
        result.append(elapsed)
    return result


def gains(runs: Iterable[Run]) -> dict[Choice, list[float]]:
    """By choice: each run's final reward minus that of the synchronous run of the same task, rate and seed, which began
    with the same model and met the same problems. Seeds without a synchronous run are left out."""
    runs = list(runs)
    base = {_pair(run): final(run) for run in runs if not run["key"]["eta"]}
    return {
        chosen: [final(run) - base[_pair(run)] for run in same if _pair(run) in base]
        for chosen, same in grouped(runs).items()
    }


def _pair(run: Run) -> tuple[str, float, int]:
    return run["key"]["task"], run["key"]["lr"], run["key"]["seed"]


def breaks(runs: Iterable[Run]) -> dict[tuple[str, float, str, str], tuple[int, int | None]]:
    """By task, rate, bound and correction: the largest max_staleness up to which all reach the synchronous reward, and
    the first that does not (None: every max_staleness that was run does)."""
    result: dict[tuple[str, float, str, str], tuple[int, int | None]] = {}
    for (task, lr, bound, eta, correction), found_gains in gains(runs).items():
        if not eta or not found_gains:
            continue
        holds, broken = result.get((task, lr, bound, correction), (0, None))
        if broken is None:
            reached = statistics.fmean(found_gains) >= -NOISE
            result[task, lr, bound, correction] = (eta, None) if reached else (holds, eta)
    return result


def tables(runs: Sequence[Run]) -> str:
    """Markdown: where each correction breaks, then for each task and rate one row a choice."""
    lines = [
        "| task | learning rate | bound | correction | as good as synchronous up to | breaks at |",
        "|" + "---|" * 6,
    ]
    for (task, lr, bound, correction), (holds, broken) in breaks(runs).items():
        lines.append(f"| {task} | {lr:g} | {bound} | {correction} | {holds} | {'-' if broken is None else broken} |")
    parts = ["\n".join(lines)]
    for task, lr in dict.fromkeys(chosen[:2] for chosen in grouped(runs)):
        parts.append(f"## {task}, learning rate {lr:g}")
        mine = [run for run in runs if choice(run)[:2] == (task, lr)]
        parts.append(_table(mine))
        if any(run.get("drift") for run in mine):
            parts.append(drifts(mine))
    return "\n\n".join(parts)


def _table(runs: Sequence[Run]) -> str:
    lines = [
        "| bound | max_staleness | correction | seeds | reward at start | final reward | difference to synchronous "
        "| mean reward | off-policy mean | max | ESS mean | least | tokens masked by age | by correction "
        "| processor seconds |",
        "|" + "---|" * 15,
    ]
    differences = gains(runs)
    for chosen, same in grouped(runs).items():
        _, _, bound, eta, correction = chosen
        finals, less = [final(run) for run in same], differences[chosen]
        lines.append(
            f"| {bound if eta else '-'} | {eta} | {correction if eta else 'synchronous'} | {len(same)} "
            f"| {_mean(run['reward'][0] for run in same):.2f} | {_mean(finals):.3f} ± {spread(finals):.3f} "
            f"| {f'{_mean(less):+.3f} ± {spread(less):.3f}' if eta and less else '-'} "
            f"| {_mean(map(mean_reward, same)):.3f} | {_over(same, 'off_policy/mean'):.2f} "
            f"| {max(max(run['series']['off_policy/max']) for run in same):.0f} "
            f"| {_over(same, 'is_weight/ess'):.3f} | {min(min(full_window(run, 'is_weight/ess')) for run in same):.3f} "
            f"| {_over(same, 'masked'):.3f} | {_over(same, 'masked/token'):.3f} "
            f"| {_mean(map(_processor, same)):.0f} |"
        )
    return "\n".join(lines)


def drifts(runs: Sequence[Run]) -> str:
    """Return a table of the drift by age: the means of each metric over all steps that trained tokens of that age."""
    values: dict[tuple[str, int, str], dict[int, list[float]]] = {}
    for (_, _, _, eta, correction), same in grouped(runs).items():
        for metric, pairs in ((metric, pairs) for run in same for metric, pairs in run.get("drift", {}).items()):
            drift = values.setdefault((metric, eta, correction if eta else "synchronous"), {})
            for age, value in pairs:
                drift.setdefault(int(age), []).append(value)
    ages = sorted({age for by_age in values.values() for age in by_age})
    lines = [
        f"| metric | max_staleness | correction | {' | '.join(f'age {age}' for age in ages)} |",
        "|" + "---|" * (3 + len(ages)),
    ]
    for (metric, eta, correction), by_age in sorted(values.items(), key=lambda item: item[0][0], reverse=True):
        cells = [f"{_mean(by_age[age]):.3f}" if age in by_age else "" for age in ages]
        lines.append(f"| `{metric}` | {eta} | {correction} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _processor(run: Run) -> float:
    series: dict[str, list[float]] = run["series"]
    return sum(series["time/write"]) + sum(series["time/train"])


def _mean(values: Iterable[float]) -> float:
    return statistics.fmean(values)


def _over(runs: Iterable[Run], name: str) -> float:
    return statistics.fmean(value for run in runs for value in full_window(run, name))
