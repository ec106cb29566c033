"""``staleflow plan`` with a target or a budget finds the best mix of engine kinds, and simulates few."""

import itertools
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from staleflow.cli.main import main
from staleflow.configs.errors import ConfigError
from staleflow.configs.loading import overrides as dotted
from staleflow.configs.schema import Config
from staleflow.configs.simulation import Fleet, Occurrence
from staleflow.sim.mixes import TOLERANCE, Found, Goal, Point, search
from tests.sim.configs import config

SLOW = Fleet(count=12, kind="slow", price=1.0)
FAST = Fleet(count=8, kind="fast", price=3.0, speed=2.5)
TRAINER_PRICE = 8.0


def priced(*fleet: Fleet, **simulation: Any) -> Config:
    """A trainer of 150 steps a minute, and engines of which several are needed to keep it busy."""
    given: dict[str, Any] = {"fleet": list(fleet or (SLOW, FAST)), "trainer_price": TRAINER_PRICE, **simulation}
    return config(steps=200, train_s=0.4, **given)


class World:
    """Simulates by a formula: the slow engines write 20 steps a minute and the fast ones 50, and the trainer takes some
    time to be fully busy."""

    def __init__(self) -> None:
        self.simulated: list[dict[str, int]] = []

    def speed(self, slow: int, fast: int) -> float:
        return 150.0 * -math.expm1(-(20.0 * slow + 50.0 * fast) / 150.0)

    def point(self, slow: int, fast: int) -> Point:
        speed = self.speed(slow, fast)
        cost = (TRAINER_PRICE + slow * SLOW.price + fast * FAST.price) / 60.0 / speed
        return Point(counts=(slow, fast), steps_per_min=speed, cost_per_step=cost)

    def __call__(self, file: Path, overrides: tuple[str, ...], steps: int) -> Mapping[str, Any]:
        (_, tables) = dotted.parse(overrides[0])
        counts = {table["kind"]: table["count"] for table in tables}
        self.simulated.append(counts)
        point = self.point(counts.get("slow", 0), counts.get("fast", 0))
        return {"steps_per_min": point.steps_per_min, "cost_per_step": point.cost_per_step}

    def every(self) -> list[Point]:
        mixes = itertools.product(range(SLOW.count + 1), range(FAST.count + 1))
        return [self.point(*counts) for counts in mixes if any(counts)]


@pytest.mark.parametrize(
    "goal",
    [
        Goal(steps=200, steps_per_min=60.0),
        Goal(steps=200, steps_per_min=130.0),
        Goal(steps=200, budget=0.55),
        Goal(steps=200, budget=0.8),
    ],
)
@pytest.mark.parametrize("jobs", [1, 3])
def test_the_best_mix_is_found_with_few_simulations(goal: Goal, jobs: int) -> None:
    world = World()
    found = search(priced(), goal, {}, jobs=jobs, simulate=world)
    best = min(filter(goal.met, world.every()), key=goal.value)
    assert goal.met(found.best)
    assert goal.value(found.best) <= goal.value(best) * (1.0 + 2.0 * TOLERANCE)
    assert len(world.simulated) == len(found.simulated) < found.mixes / 3
    assert (found.mixes, found.complete) == (13 * 9 - 1, True)
    assert found.simulated[0] == found.best


def test_no_mix_has_more_engines_of_a_kind_than_it_may() -> None:
    world = World()
    found = search(priced(), Goal(steps=200, steps_per_min=60.0), {"slow": 1, "fast": 2}, simulate=world)
    assert found.best.counts in {(0, 2), (1, 2)}
    assert all(counts.get("slow", 0) <= 1 and counts.get("fast", 0) <= 2 for counts in world.simulated)


def refused(goal: Goal, given: Config, most: dict[str, int], simulate: Callable[..., Any]) -> str:
    with pytest.raises(ConfigError) as error:
        search(given, goal, most, simulate=simulate)
    return str(error.value)


def test_a_goal_that_no_mix_reaches_is_refused_with_what_is_reachable() -> None:
    said = refused(Goal(steps=200, steps_per_min=151.0), priced(), {}, World())
    assert "the trainer makes 150.000 and all engines" in said
    said = refused(Goal(steps=200, steps_per_min=100.0), priced(), {"slow": 3, "fast": 1}, World())
    fastest = World().speed(3, 1)
    assert f"3 slow + 1 fast makes {fastest:.3f} steps/min" in said
    cheapest = min(point.cost_per_step for point in World().every()) * 200
    said = refused(Goal(steps=200, budget=cheapest * 0.97), priced(), {}, World())
    cost = float(re.findall(r"costs ([\d.]+) for 200 steps", said)[0])
    assert cost == pytest.approx(cheapest, rel=2 * TOLERANCE)
    assert "no mix trains at that cost" in refused(Goal(steps=200, budget=1e-3), priced(), {}, World())


def test_a_mix_that_stalls_is_passed_over() -> None:
    def stalls(file: Path, overrides: tuple[str, ...], steps: int) -> Mapping[str, Any] | None:
        return None if "slow" in overrides[0] else World()(file, overrides, steps)

    found = search(priced(), Goal(steps=200, steps_per_min=60.0), {"slow": 2, "fast": 3}, simulate=stalls)
    assert found.best.counts[0] == 0


@pytest.mark.parametrize(
    ("given", "most", "named"),
    [
        (priced(msgspec.structs.replace(SLOW, price=0.0), trainer_price=0.0), {}, "simulation.fleet.price"),
        (priced(SLOW, SLOW), {}, "each kind of a plan needs a name of its own"),
        (priced(events=[Occurrence(at_s=1.0, engine=0, what="leave")]), {}, "simulation.events"),
        (priced(), {"h20": 2}, "the kinds of simulation.fleet are slow, fast"),
        (priced(), {"slow": 10**6}, "at most 200,000 mixes"),
    ],
)
def test_what_no_search_can_use_is_refused(given: Config, most: dict[str, int], named: str) -> None:
    assert named in refused(Goal(steps=200, steps_per_min=60.0), given, most, World())


def test_a_mix_is_simulated_with_the_shipped_scheduler_and_printed_with_its_override(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["trainer.steps=50", "trainer.simulated_step_s=0.4", "simulation.trainer_price=8"]
    fleet = 'simulation.fleet=[{kind="slow", count=2, price=1.0}, {kind="fast", count=2, price=3.0, speed=2.0}]'
    goal = ["--target-steps-per-min", "20", "--max", "slow=1", "--max", "fast=1"]
    assert main(["plan", "configs/simulated.toml", *given, fleet, *goal, "--json"]) == 0
    found = msgspec.json.decode(capsys.readouterr().out, type=dict[str, Any])
    assert found["best"]["steps_per_min"] >= 20
    assert found["best"]["cost_per_step"] == pytest.approx(
        (8.0 + found["best"]["counts"][0] * 1.0 + found["best"]["counts"][1] * 3.0)
        / 60.0
        / found["best"]["steps_per_min"],
        rel=1e-6,
    )


def test_the_table_marks_the_best_mix(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from staleflow.cli.mixes import show

    monkeypatch.setenv("COLUMNS", "120")
    found: Found = search(priced(), Goal(steps=200, steps_per_min=130.0), {}, simulate=World())
    show(found, priced())
    out = capsys.readouterr().out
    row = next(line for line in out.splitlines() if "cheapest" in line)
    assert f"{found.best.steps_per_min:.3f}" in row
    assert re.search(r'simulation\.fleet=\[\{"?count"?=|simulation\.fleet=\[\{', out)
    assert f"{len(found.simulated)} of 116 mixes simulated" in out


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--budget", "1", "--target-hours", "2"], "--budget"),
        (["--budget", "1", "--etas", "1"], "--etas"),
        (["--budget", "1", "--devices", "8"], "--devices"),
        (["--max", "slow=1"], "--max"),
        (["--budget", "1", "--max", "slow"], "KIND=N"),
        (["--budget", "1", "--memory"], "--budget"),
    ],
)
def test_options_that_contradict_each_other_are_refused(
    words: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "configs/simulated.toml", *words]) == 2
    assert named in capsys.readouterr().err
