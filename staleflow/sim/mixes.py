"""Search the mixes of engine kinds: the cheapest one that reaches a speed, or the fastest one that a budget pays for.

A mix is the number of engines of each kind. Two bounds need no simulation: no mix is faster than its trainer, nor than
its engines with all slots running. Each simulated mix bounds the others: one whose engines could write twice as many
tokens is at most twice as fast, and one with weaker engines is not faster, both up to ``OPTIMISM``. The next mix to be
simulated is the one that is best if it reaches its bounds. The search ends when no other one can be better by
``TOLERANCE``.
"""

import itertools
import json
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec

from staleflow.configs.errors import ConfigError
from staleflow.configs.loading.toml import dumps
from staleflow.configs.schema import Config
from staleflow.configs.simulation import Fleet
from staleflow.sim.charges import Charges
from staleflow.sim.check import check, fleet, kinds
from staleflow.sim.measure import full_rate, trainer_limit
from staleflow.sim.plan import summary_of
from staleflow.sim.prices import trainer_price
from staleflow.sim.workload import Workload

STEPS = 40
"""Steps of each simulation."""
MAX_SIMULATIONS = 48
MAX_MIXES = 200_000
OPTIMISM = 1.02
"""Factor by which the bounds from simulated mixes are raised: runs differ by chance, and kinds are not alike."""
TOLERANCE = 0.01
"""Smallest relative improvement that is worth a simulation."""
SAMPLED_GROUPS = 512
"""Groups whose lengths are drawn for the bounds."""

Counts = tuple[int, ...]
Simulate = Callable[[Path, tuple[str, ...], int], Mapping[str, Any] | None]
"""Simulates a configuration file with overrides and a number of steps; None if the run is not possible."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Speed and cost of a mix, simulated or as bounds."""

    counts: Counts
    steps_per_min: float
    cost_per_step: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """A minimum speed, or a maximum cost of the whole run; the other one is 0."""

    steps: int
    """Steps of the run."""
    steps_per_min: float = 0.0
    budget: float = 0.0

    def met(self, point: Point) -> bool:
        """Return whether a mix reaches the goal."""
        if self.budget:
            return point.cost_per_step * self.steps <= self.budget
        return point.steps_per_min >= self.steps_per_min

    def value(self, point: Point) -> float:
        """Return what the best mix minimizes: the cost of a step, or the minutes of a step under a budget."""
        if self.budget:
            return 1.0 / point.steps_per_min if point.steps_per_min else math.inf
        return point.cost_per_step


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Result of a search."""

    kinds: tuple[Fleet, ...]
    goal: Goal
    best: Point
    simulated: list[Point] = field(repr=False)
    """All simulated mixes, the best first and those that miss the goal last."""
    mixes: int
    """Number of all mixes within the maximum counts."""
    complete: bool
    """False if the search ended after ``MAX_SIMULATIONS``."""


class Bounds:
    """Limits of each mix, by arithmetic."""

    def __init__(self, config: Config, of_kinds: Sequence[Fleet]) -> None:
        charges, workload = Charges.of(config), Workload(config)
        check(config, workload, charges)
        groups = [workload.samples(group, group + 1)[: workload.group_size] for group in range(SAMPLED_GROUPS)]
        lengths = [sample.length for samples in groups for sample in samples]
        prompt, batch = config.simulation.prompt_tokens, config.trainer.batch_size
        tokens = round(fmean(lengths) + prompt) * batch * config.rollout.group_size
        self.trainer = trainer_limit([charges.train_s(batch, tokens)], charges) or math.inf
        """Steps per minute of the trainer."""
        costs = (charges.step_cost(kind.speed, kind.compute) for kind in of_kinds)
        self._engines = [
            full_rate(config, cost, kind.slots, kind.kv_tokens, lengths)
            for cost, kind in zip(costs, of_kinds, strict=True)
        ]
        self._prices = [kind.price for kind in of_kinds]
        self._trainer_price = trainer_price(config)

    def engines(self, counts: Counts) -> float:
        """Return the steps per minute of the engines."""
        return sum(count * rate for count, rate in zip(counts, self._engines, strict=True))

    def price(self, counts: Counts) -> float:
        """Return the price of a mix and its trainer for an hour."""
        return self._trainer_price + sum(count * price for count, price in zip(counts, self._prices, strict=True))

    def point(self, counts: Counts, speed: float | None = None) -> Point:
        """Return a mix with the cost at a speed, by default its highest."""
        speed = min(self.engines(counts), self.trainer) if speed is None else speed
        cost = self.price(counts) / 60.0 / speed if speed else math.inf
        return Point(counts=counts, steps_per_min=speed, cost_per_step=cost)


class Search:
    """The mixes of one search, and what is known about each."""

    def __init__(self, bounds: Bounds, goal: Goal, most: Sequence[int]) -> None:
        self._bounds = bounds
        self._goal = goal
        points = map(bounds.point, itertools.islice(itertools.product(*(range(n + 1) for n in most)), 1, None))
        self.mixes = math.prod(n + 1 for n in most) - 1
        self._open = {point.counts: point for point in points if goal.met(point)}
        self.simulated: list[Point] = []

    def best(self) -> Point | None:
        """Return the best simulated mix that meets the goal."""
        return min(filter(self._goal.met, self.simulated), key=self._goal.value, default=None)

    def next(self, count: int) -> list[Counts]:
        """Return up to ``count`` mixes to simulate, the most promising first."""
        best = self.best()
        limit = math.inf if best is None else self._goal.value(best) * (1.0 - TOLERANCE)
        hopes = map(self._hope, self._open.values())
        hopeful = [hope for hope in hopes if self._goal.met(hope) and self._goal.value(hope) < limit]
        hopeful.sort(key=lambda hope: (self._goal.value(hope), self._bounds.price(hope.counts), hope.counts))
        return [hope.counts for hope in hopeful[:count]]

    def add(self, point: Point) -> None:
        """Add a simulated mix."""
        self._open.pop(point.counts, None)
        self.simulated.append(point)

    def _hope(self, bound: Point) -> Point:
        """Return what a mix may reach, by its bounds and the simulated mixes."""
        engines = self._bounds.engines(bound.counts)
        speed = bound.steps_per_min
        for point in self.simulated:
            if not point.steps_per_min:  # it stalled, which is no measure of the others
                continue
            growth = max(engines / self._bounds.engines(point.counts), 1.0)
            speed = min(speed, OPTIMISM * point.steps_per_min * growth)
        return self._bounds.point(bound.counts, speed)


def search(
    config: Config,
    goal: Goal,
    most: Mapping[str, int],
    *,
    jobs: int = 1,
    simulate: Simulate = summary_of,
    on_progress: Callable[[int], None] = lambda simulated: None,
) -> Found:
    """Return the best mix of the configuration's kinds. ``most``: maximum number of engines by kind, instead of the
    configuration's. Raise ``ConfigError`` for a goal that no mix reaches, which names what is reachable."""
    of_kinds = kinds(config)
    _check(config, of_kinds, most)
    counts = [most.get(kind.kind, kind.count) for kind in of_kinds]
    if math.prod(n + 1 for n in counts) > MAX_MIXES:
        allowed = f"at most {MAX_MIXES:,} mixes: lower the maximum of a kind"
        raise ConfigError("--max", " x ".join(map(str, counts)), allowed)
    one_each = [msgspec.structs.replace(kind, count=1) for kind in of_kinds]
    bounds = Bounds(config, fleet(_with(config, one_each)))
    found = Search(bounds, goal, counts)
    complete = True
    with tempfile.TemporaryDirectory(prefix="staleflow-mixes-") as place, ThreadPoolExecutor(jobs) as pool:
        file = Path(place) / "mixes.toml"
        file.write_text(dumps(msgspec.to_builtins(config)))

        def simulated(mix: Counts) -> Point:
            summary = simulate(file, (fleet_override(of_kinds, mix),), STEPS)
            if summary is None:
                return Point(counts=mix, steps_per_min=0.0, cost_per_step=math.inf)
            return Point(counts=mix, steps_per_min=summary["steps_per_min"], cost_per_step=summary["cost_per_step"])

        while todo := found.next(jobs):
            if len(found.simulated) >= MAX_SIMULATIONS:
                complete = False
                break
            for point in pool.map(simulated, todo):
                found.add(point)
                on_progress(len(found.simulated))
    best = found.best()
    if best is None:
        raise _unreachable(of_kinds, goal, bounds, found, tuple(counts))
    ordered = sorted(found.simulated, key=lambda point: (not goal.met(point), goal.value(point)))
    return Found(kinds=tuple(of_kinds), goal=goal, best=best, simulated=ordered, mixes=found.mixes, complete=complete)


def _check(config: Config, of_kinds: Sequence[Fleet], most: Mapping[str, int]) -> None:
    names = [kind.kind for kind in of_kinds]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError("simulation.fleet.kind", twice, "each kind of a plan needs a name of its own")
    for name in most:
        if name not in names:
            raise ConfigError("--max", name, f"the kinds of simulation.fleet are {', '.join(names)}")
    if config.simulation.events:
        raise ConfigError("simulation.events", len(config.simulation.events), "0: events name engines of one mix")
    if not trainer_price(config) and not any(kind.price for kind in of_kinds):
        allowed = "a plan needs prices: simulation.fleet.price, simulation.trainer_price, or those of [launch]"
        raise ConfigError("simulation.fleet.price", 0.0, allowed)


def _with(config: Config, listed: Sequence[Fleet]) -> Config:
    simulation = msgspec.structs.replace(config.simulation, fleet=list(listed))
    return msgspec.structs.replace(config, simulation=simulation)


def fleet_override(of_kinds: Sequence[Fleet], mix: Counts) -> str:
    """Return the override that gives a configuration the engines of a mix."""
    default = msgspec.to_builtins(Fleet(count=0))
    tables = [
        {key: value for key, value in (table | {"count": count}).items() if value != default[key]}
        for table, count in zip(map(msgspec.to_builtins, of_kinds), mix, strict=True)
        if count
    ]
    written = ("{" + ", ".join(f"{key}={json.dumps(value)}" for key, value in table.items()) + "}" for table in tables)
    return f"simulation.fleet=[{', '.join(written)}]"


def named(of_kinds: Sequence[Fleet], counts: Counts) -> str:
    """Return a mix in words."""
    return " + ".join(f"{count} {kind.kind}" for kind, count in zip(of_kinds, counts, strict=True) if count)


def _unreachable(of_kinds: Sequence[Fleet], goal: Goal, bounds: Bounds, found: Search, most: Counts) -> ConfigError:
    """Return the error for a goal that no mix reaches."""
    if goal.budget:
        cheapest = min(found.simulated, key=lambda point: point.cost_per_step, default=None)
        if cheapest is None or not cheapest.steps_per_min:
            return ConfigError("--budget", goal.budget, "no mix trains at that cost, by the prices and bounds alone")
        cost = cheapest.cost_per_step * goal.steps
        allowed = f"the cheapest mix that was simulated ({named(of_kinds, cheapest.counts)}) costs {cost:,.4g}"
        return ConfigError("--budget", goal.budget, f"{allowed} for {goal.steps:,} steps")
    key, value = "--target-steps-per-min", round(goal.steps_per_min, 3)
    fastest = max(found.simulated, key=lambda point: point.steps_per_min, default=None)
    if fastest is None:
        limits = f"the trainer makes {bounds.trainer:.3f} and all engines {bounds.engines(most):.3f} steps/min at most"
        return ConfigError(key, value, f"{limits} ({named(of_kinds, most)})")
    reached = f"{named(of_kinds, fastest.counts)} makes {fastest.steps_per_min:.3f} steps/min"
    return ConfigError(key, value, f"{reached}, the fastest mix that was simulated")
