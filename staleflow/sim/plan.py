"""Which bound, policy and size of fleet suit a workload: the simulator, searched.

Two rounds. First every ``max_staleness`` beside every way to keep the bound, briefly. Then what is on the front of that
(nothing else is faster, fresher and less wasteful at once) with other admissions, redundancies and splits of the
devices, at length. What is printed is the front of everything that was simulated at length.
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
from staleflow.sim.compare import OWN

SHORT, LONG = 24, 80
"""Steps of a simulation in the two rounds."""
ADMISSIONS = ("fill", "just_in_time")
REDUNDANCIES = (1.0, 1.25)

Told = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A point of the search: overrides of the configuration, and what they came to."""

    overrides: tuple[str, ...]
    steps_per_min: float
    of_limit: float
    """Share of what the trainer could do, of the split at hand; 0 where its steps take no time."""
    staleness_mean: float
    staleness_max: int
    waste: float
    """Share of the generated tokens that no step learned from: thrown away, or masked."""
    length_bias: float

    def beats(self, other: "Choice") -> bool:
        """As fast, as fresh and as thrifty, and better in one of them."""
        mine, theirs = _measures(self), _measures(other)
        return mine != theirs and all(a <= b for a, b in zip(mine, theirs, strict=True))


def choice(overrides: Sequence[str], result: Mapping[str, Any]) -> Choice:
    """What the summary of a simulation says about its overrides."""
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
    """Those that no other one beats, fastest first; of equals the first."""
    kept: dict[tuple[float, float, float], Choice] = {}
    for one in choices:
        if not any(other.beats(one) for other in choices):
            kept.setdefault((one.steps_per_min, one.staleness_mean, one.waste), one)
    return sorted(kept.values(), key=lambda one: (-one.steps_per_min, one.staleness_mean, one.waste))


def picks(found: Sequence[Choice]) -> dict[str, Choice]:
    """Three of a front to choose from: the freshest, the fastest, and between them the knee, which is nearest to being
    the fastest, the freshest and the thriftiest at once, each in shares of what the front spans."""
    spans: list[tuple[float, float]] = [
        (min(values), max(values)) for values in zip(*map(_measures, found), strict=True)
    ]

    def away(one: Choice) -> float:
        shares = [
            (value - low) / (high - low) for value, (low, high) in zip(_measures(one), spans, strict=True) if high > low
        ]
        return sum(share * share for share in shares)

    freshest = min(found, key=lambda one: (one.staleness_mean, -one.steps_per_min))
    return {
        "freshest": freshest,
        "knee": min(found, key=away),
        "fastest": max(found, key=lambda one: one.steps_per_min),
    }


def _measures(one: Choice) -> tuple[float, float, float]:
    """Each the better the smaller."""
    return -one.steps_per_min, one.staleness_mean, one.waste


def splits(config: Config, devices: int | None) -> list[tuple[str, ...]]:
    """Ways to share ``devices`` out over engines and trainer ranks, one each, the configuration's own first; a step
    takes as much shorter as it has more ranks. None: no other than its own."""
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
    """Every bound and policy at every ``max_staleness``; at 0 all of them are synchronous."""
    found = [(*split, "staleness.max_staleness=0", *OWN["wait"])] if 0 in etas else []
    return found + [
        (*split, f"staleness.max_staleness={eta}", *policy) for eta in etas if eta for policy in OWN.values()
    ]


def second_round(
    chosen: Sequence[Choice], own: tuple[str, ...], others: Sequence[tuple[str, ...]]
) -> list[tuple[str, ...]]:
    """What came out of the first round, with other admissions and redundancies, and with other splits than ``own``."""
    found: list[tuple[str, ...]] = []
    for one in chosen:
        rest = one.overrides[len(own) :]
        found += [
            (*own, *rest, f"coordination.admission={admission}", f"rollout.redundancy.groups={groups}")
            for admission in ADMISSIONS
            for groups in REDUNDANCIES
        ]
        found += [(*split, *rest) for split in others]
    return found


def plan(
    config: Config,
    etas: Sequence[int],
    *,
    devices: int | None = None,
    jobs: int = 1,
    told: Told = lambda done, of: None,
) -> Iterator[Choice]:
    """Every choice that is simulated at length, as it comes, ``jobs`` at once; ``front`` of them all is the plan.

    One that stalls for good, or that the configuration's other keys forbid, is left out. ``told`` hears how many steps
    were simulated, of how many; the second round is not known before the first is over, and guessed to be as long.
    """
    own, *others = splits(config, devices)
    with tempfile.TemporaryDirectory(prefix="staleflow-plan-") as place, ThreadPoolExecutor(jobs) as pool:
        file = Path(place) / "plan.toml"
        file.write_text(dumps(msgspec.to_builtins(config)))
        begin = first_round(etas, own)
        first = SHORT * len(begin)
        short = list(_all(pool, file, begin, SHORT, lambda done: told(done, 2 * first)))
        then = second_round(front(short), own, others)
        yield from _all(pool, file, then, LONG, lambda done: told(first + done, first + LONG * len(then)))


def _all(
    pool: ThreadPoolExecutor, file: Path, todo: Sequence[tuple[str, ...]], steps: int, told: Callable[[int], None]
) -> Iterator[Choice]:
    for done, one in enumerate(pool.map(_one, repeat(file), todo, repeat(steps)), start=1):
        told(done * steps)
        if one is not None:
            yield one


def _one(file: Path, overrides: tuple[str, ...], steps: int) -> Choice | None:
    """A process of its own for each: what it prints is all that comes back."""
    verb = [sys.executable, "-m", "staleflow.cli", "simulate", str(file), *overrides, "--steps", str(steps), "--json"]
    done = subprocess.run(verb, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    return choice(overrides, msgspec.json.decode(done.stdout)) if done.returncode == 0 else None
