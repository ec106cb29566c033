"""Search the simulator for the bound, policy and fleet size that suit a workload.

Two rounds. The first simulates every ``max_staleness`` with every way to keep the bound, briefly. The second simulates
the Pareto front of the first (speed, freshness, waste) with other admissions, redundancies and splits of the devices,
at length. The result is the front of everything that was simulated at length.
"""

import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any

import msgspec

from staleflow.configs.errors import ConfigError
from staleflow.configs.loading.toml import dumps
from staleflow.configs.schema import Config
from staleflow.sim.peers.compare import OWN

SHORT_STEPS, LONG_STEPS = 24, 80
"""Steps of a simulation in the two rounds."""
ADMISSIONS = ("fill", "just_in_time")
REDUNDANCIES = (1.0, 1.25)

OnProgress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A point of the search: overrides of the configuration, and the results of their simulation."""

    overrides: tuple[str, ...]
    steps_per_min: float
    of_limit: float
    """Share of the trainer's limit under this split; 0 if its steps take no time."""
    staleness_mean: float
    staleness_max: int
    waste: float
    """Share of the generated tokens that no step learned from: discarded or masked."""
    length_bias: float

    def beats(self, other: "Choice") -> bool:
        """Return whether this choice is as fast, fresh and thrifty as the other, and better in one of them."""
        mine, theirs = _measures(self), _measures(other)
        return mine != theirs and all(a <= b for a, b in zip(mine, theirs, strict=True))


def choice(overrides: Sequence[str], result: Mapping[str, Any]) -> Choice:
    """Return the choice that a simulation's summary describes."""
    return Choice(
        overrides=tuple(overrides),
        steps_per_min=result["steps_per_min"],
        of_limit=result["steps_per_min"] / result["trainer_limit"] if result["trainer_limit"] else 0.0,
        staleness_mean=result["staleness_mean"],
        staleness_max=result["staleness_max"],
        waste=result["discarded"] + (1.0 - result["discarded"]) * result["masked"],
        length_bias=result["length_bias"],
    )


def front(choices: Sequence[Choice]) -> list[Choice]:
    """Return the choices that no other one beats, fastest first; of equal ones the first."""
    kept: dict[tuple[float, float, float], Choice] = {}
    for one in choices:
        if not any(other.beats(one) for other in choices):
            kept.setdefault((one.steps_per_min, one.staleness_mean, one.waste), one)
    return sorted(kept.values(), key=lambda one: (-one.steps_per_min, one.staleness_mean, one.waste))


def picks(choices: Sequence[Choice]) -> dict[str, Choice]:
    """Return three choices of a front: the freshest, the fastest, and the knee between them, which is nearest to being
    the fastest, freshest and thriftiest at once, each relative to the span of the front."""
    spans: list[tuple[float, float]] = [
        (min(values), max(values)) for values in zip(*map(_measures, choices), strict=True)
    ]

    def distance(one: Choice) -> float:
        shares = [
            (value - low) / (high - low) for value, (low, high) in zip(_measures(one), spans, strict=True) if high > low
        ]
        return sum(share * share for share in shares)

    freshest = min(choices, key=lambda one: (one.staleness_mean, -one.steps_per_min))
    return {
        "freshest": freshest,
        "knee": min(choices, key=distance),
        "fastest": max(choices, key=lambda one: one.steps_per_min),
    }


def _measures(one: Choice) -> tuple[float, float, float]:
    """Return the measures of a choice; smaller is better."""
    return -one.steps_per_min, one.staleness_mean, one.waste


def splits(config: Config, devices: int | None) -> list[tuple[str, ...]]:
    """Return the ways to split ``devices`` into engines and trainer ranks, one each, the configuration's own first. A
    step's time is inversely proportional to its ranks. None: only the configuration's own split."""
    own = config.trainer.nproc
    if devices is None:
        return [()]
    if devices <= own:
        raise ConfigError("--devices", devices, f"more than the trainer's own {own}: each engine needs one, too")
    work_s = config.trainer.simulated_step_s * own
    others = sorted({1, devices // 8, devices // 4, devices // 2, devices - 1} - {0, own})
    return [
        (f"rollout.workers={devices - ranks}", f"trainer.simulated_step_s={work_s / ranks!r}")
        for ranks in (own, *others)
    ]


def first_round(etas: Sequence[int], split: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Return every bound and policy at every ``max_staleness``; at 0 all of them are synchronous."""
    overrides = [(*split, "staleness.max_staleness=0", *OWN["wait"])] if 0 in etas else []
    return overrides + [
        (*split, f"staleness.max_staleness={eta}", *policy) for eta in etas if eta for policy in OWN.values()
    ]


def second_round(
    chosen: Sequence[Choice], own: tuple[str, ...], others: Sequence[tuple[str, ...]]
) -> list[tuple[str, ...]]:
    """Return the chosen ones with other admissions and redundancies, and with other splits than ``own``."""
    overrides: list[tuple[str, ...]] = []
    for one in chosen:
        rest = one.overrides[len(own) :]
        overrides += [
            (*own, *rest, f"coordination.admission={admission}", f"rollout.redundancy.groups={groups}")
            for admission in ADMISSIONS
            for groups in REDUNDANCIES
        ]
        overrides += [(*split, *rest) for split in others]
    return overrides


def plan(
    config: Config,
    etas: Sequence[int],
    *,
    devices: int | None = None,
    jobs: int = 1,
    on_progress: OnProgress = lambda finished, total: None,
) -> Iterator[Choice]:
    """Yield every choice that is simulated at length, as it finishes, ``jobs`` at once; the plan is the ``front`` of
    them all.

    A choice that stalls, or that the configuration's other keys forbid, is skipped. ``on_progress`` receives the number
    of simulated steps and the total; the second round is unknown until the first finishes, and estimated to be as long.
    """
    own, *others = splits(config, devices)
    with tempfile.TemporaryDirectory(prefix="staleflow-plan-") as place, ThreadPoolExecutor(jobs) as pool:
        file = Path(place) / "plan.toml"
        file.write_text(dumps(msgspec.to_builtins(config)))
        begin = first_round(etas, own)
        first = SHORT_STEPS * len(begin)
        short = list(_all(pool, file, begin, SHORT_STEPS, lambda finished: on_progress(finished, 2 * first)))
        then = second_round(front(short), own, others)
        yield from _all(
            pool, file, then, LONG_STEPS, lambda finished: on_progress(first + finished, first + LONG_STEPS * len(then))
        )


def _all(
    pool: ThreadPoolExecutor,
    file: Path,
    todo: Sequence[tuple[str, ...]],
    steps: int,
    on_progress: Callable[[int], None],
) -> Iterator[Choice]:
    for finished, one in enumerate(pool.map(_one, repeat(file), todo, repeat(steps)), start=1):
        on_progress(finished * steps)
        if one is not None:
            yield one


def _one(file: Path, overrides: tuple[str, ...], steps: int) -> Choice | None:
    summary = summary_of(file, overrides, steps)
    return None if summary is None else choice(overrides, summary)


def summary_of(file: Path, overrides: tuple[str, ...], steps: int) -> dict[str, Any] | None:
    """Simulate in a process of its own; return the result's summary, or None if the run stalls or is not allowed."""
    verb = [sys.executable, "-m", "staleflow.cli", "simulate", str(file), *overrides, "--steps", str(steps), "--json"]
    process = subprocess.run(verb, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    return msgspec.json.decode(process.stdout) if process.returncode == 0 else None
