"""Every strategy finishes whole runs, keeps the bound, and has its intended effect."""

import itertools
from collections import Counter
from pathlib import Path
from statistics import fmean
from typing import get_args

import pytest
from msgspec.structs import replace

from staleflow.configs.schema import Config, Coordination, Redundancy
from staleflow.configs.simulation import Fleet, Occurrence
from staleflow.protocols.consistency.limits import Bound, OnOverdue
from staleflow.protocols.coordination.admission import Admission
from staleflow.protocols.coordination.migration import Migration
from staleflow.protocols.coordination.routing import Routing
from staleflow.protocols.coordination.sync import Sync
from staleflow.sim.result import Result
from staleflow.sim.simulate import simulate
from staleflow.trace.audit.report import audit
from staleflow.trace.reader import read_events
from tests.sim.configs import config

TROUBLE = [
    Occurrence(at_s=3.0, engine=0, what="crash"),
    Occurrence(at_s=5.0, engine=1, what="hang"),
    Occurrence(at_s=8.0, engine=1, what="return"),
    Occurrence(at_s=9.0, engine=0, what="return"),
]
HEAVY = {"sigma": 1.5, "mean_tokens": 120.0}
"""Length settings with a tail that stalls steps: one trajectory in forty is ten times as long as the mean."""
CHOICES = [
    *itertools.product(get_args(Routing), ["greedy"], ["none"], get_args(Admission)),
    *itertools.product(["cost_model"], get_args(Sync), get_args(Migration), ["just_in_time"]),
]
SEEDS = range(3)


def chosen(of: Config, **coordination: object) -> Config:
    return replace(of, coordination=Coordination(**coordination))  # type: ignore[arg-type]


@pytest.mark.parametrize(("routing", "sync", "migration", "admission"), sorted(set(CHOICES)))
@pytest.mark.parametrize("bound", Bound)
def test_a_run_with_failing_engines_filters_and_spares_ends_and_keeps_the_bound(
    routing: Routing, sync: Sync, migration: Migration, admission: Admission, bound: Bound, tmp_path: Path
) -> None:
    of = config(bound=bound, max_staleness=2, events=TROUBLE, pull_s=0.3, filter_share=0.2, engines=3)
    of = replace(of, rollout=replace(of.rollout, redundancy=Redundancy(groups=1.25, samples=1.5)))
    named = {"routing": routing, "sync": sync, "migration": migration, "admission": admission}
    result = simulate(chosen(of, **named), run_dir=tmp_path)
    assert (len(result.steps), result.violations) == (12, 0)
    assert audit(tmp_path / "trace.jsonl").violations == []


@pytest.mark.parametrize("sync", get_args(Sync))
@pytest.mark.parametrize("on_update", ["keep", "recompute", "drain"])
def test_a_group_that_is_begun_anew_at_the_newest_version_finds_it_loaded(
    sync: Sync, on_update: str, tmp_path: Path
) -> None:
    """``retry`` leases at the newest version, regardless of the version that the strategy has let the engine load."""
    of = config(
        on_overdue=OnOverdue.RETRY, batch_size=2, group_size=4, engines=5, slots=12, steps=20, train_s=0.15, pull_s=0.1
    )
    of = replace(of, rollout=replace(of.rollout, on_update=on_update))
    result = simulate(chosen(of, sync=sync), run_dir=tmp_path)
    assert (len(result.steps), result.violations) == (20, 0)
    told = Counter(event["why"] for event in read_events(tmp_path / "trace.jsonl") if event["ev"] == "release")
    assert told["overdue"] >= 5
    assert told["aborted"] == 0


def heavy(admission: Admission, max_staleness: int, **more: object) -> list[Result]:
    """Runs of 60 steps whose prompts have the same lengths under every admission policy."""
    runs: list[Result] = []
    for seed in SEEDS:
        of = config(
            steps=60, batch_size=8, group_size=1, engines=4, longest=2000, max_staleness=max_staleness, seed=seed,
            lengths=HEAVY | {"prompt_share": 1.0},
            **more,  # type: ignore[arg-type]
        )  # fmt: skip
        runs.append(simulate(chosen(of, admission=admission)))
    return runs


def mean(runs: list[Result], name: str) -> float:
    return fmean(getattr(run, name) for run in runs)


@pytest.mark.parametrize("max_staleness", [1, 2, 3])
def test_where_long_groups_stall_the_steps_just_in_time_is_no_slower_and_fresher(max_staleness: int) -> None:
    fill, just = (heavy(admission, max_staleness) for admission in ("fill", "just_in_time"))
    assert mean(just, "steps_per_min") > mean(fill, "steps_per_min")
    assert mean(just, "staleness_mean") < 0.85 * mean(fill, "staleness_mean")


def test_where_the_trainer_is_what_limits_it_is_as_fast_and_fresher() -> None:
    fill, just = (heavy(admission, 3, train_s=20.0) for admission in ("fill", "just_in_time"))
    assert mean(just, "steps_per_min") > 0.98 * mean(fill, "steps_per_min")
    assert mean(just, "staleness_mean") < 0.75 * mean(fill, "staleness_mean")


def test_under_the_token_bound_it_masks_less() -> None:
    fill, just = (heavy(admission, 3, bound=Bound.TOKEN, train_s=4.0) for admission in ("fill", "just_in_time"))
    assert mean(just, "steps_per_min") > 0.93 * mean(fill, "steps_per_min")
    assert mean(just, "masked") < 0.6 * mean(fill, "masked")


def test_slow_engines_get_less_by_the_cost_model() -> None:
    """With even shares, a fleet of two engine kinds would be as slow as the slower kind."""
    fleet = [Fleet(count=2, speed=1.0), Fleet(count=2, speed=0.25)]
    of = config(steps=40, batch_size=8, group_size=1, engines=4, longest=2000, lengths=HEAVY, fleet=fleet)
    even, by_cost = (simulate(chosen(of, routing=routing)) for routing in ("least_loaded", "cost_model"))
    assert by_cost.steps_per_min > 1.5 * even.steps_per_min
