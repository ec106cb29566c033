"""The trainer republishes a version that is damaged before any load and blocks all later ones: no other copy exists."""

from dataclasses import replace

from staleflow.sim.faults.__main__ import describe
from staleflow.sim.faults.plan import plan_of
from staleflow.sim.faults.run import run_plan

ON_POLICY = 12
"""A seed with bound 0: no tokens are generated until the newest version is loaded."""


def test_a_newest_version_that_nobody_can_load_is_published_again() -> None:
    plan = replace(plan_of(ON_POLICY), kinds=("flip a byte of the weights",), every_s=3.0)
    assert plan.config.staleness.max_staleness == 0
    found = run_plan(plan, 600)
    assert found.ok, describe(found)
    assert found.counts["a damaged version was published again"] >= 1
