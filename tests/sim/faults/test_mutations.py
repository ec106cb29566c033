"""The simulation detects bugs: each bug planted into the shipped code is reported by one of its rules."""

from typing import Any

import pytest

from staleflow.sim.faults.reconcile import Rule
from staleflow.sim.faults.run import run_plan
from staleflow.trace.audit.report import FileRule
from staleflow.trace.audit.state import Rule as AuditRule
from tests.sim.faults.mutants import MUTANTS, Mutant

TRIES = 12
"""Number of seeds, one of which must expose the bug. The effect of a seed changes whenever the shipped code does."""


def test_every_rule_names_a_planted_bug() -> None:
    named = {rule for mutant in MUTANTS if not mutant.long for rule in mutant.rules}
    assert {rule.name for rule in (*FileRule, *AuditRule, *Rule)} == named


_clean: dict[tuple[object, int], list[tuple[str, str]]] = {}
"""Violations without a bug, by run and seed: several bugs are planted into the same run."""


def violations_without_the_bug(mutant: Mutant, seed: int) -> list[tuple[str, str]]:
    key = (mutant.run, seed)
    if key not in _clean:
        _clean[key] = run_plan(mutant.plan(seed), mutant.events).violations
    return _clean[key]


def case(mutant: Mutant) -> Any:
    """One test. One worker of xdist tests all bugs with the same faults: they may share the run without a bug."""
    name = mutant.name.replace(" ", "_")
    group = f"bugs under {', '.join(mutant.kinds)}" if mutant.kinds else name
    marks = [pytest.mark.xdist_group(group), *([pytest.mark.long] if mutant.long else [])]
    return pytest.param(mutant, marks=marks, id=name)


@pytest.mark.parametrize("mutant", [case(mutant) for mutant in MUTANTS])
def test_a_planted_bug_is_named_by_a_rule(mutant: Mutant) -> None:
    seen: list[list[tuple[str, str]]] = []
    for seed in range(mutant.seed, mutant.seed + TRIES):
        with mutant.planted():
            seen.append(run_plan(mutant.plan(seed), mutant.events).violations)
        if {rule for rule, _ in seen[-1]} & mutant.rules:
            if mutant.kinds:  # test_seeds runs the unmodified plans of seeds
                assert violations_without_the_bug(mutant, seed) == [], "the same run without the bug"
            return
    pytest.fail(f"no rule of {', '.join(sorted(mutant.rules))} named it: {[found[:3] for found in seen]}")
