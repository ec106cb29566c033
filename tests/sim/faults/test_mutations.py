"""The simulation detects bugs: each bug planted into the shipped code is reported by one of its rules."""

import pytest

from staleflow.sim.faults.reconcile import Rule
from staleflow.sim.faults.run import run_plan
from staleflow.trace.audit.report import FileRule
from staleflow.trace.audit.state import Rule as AuditRule
from tests.sim.faults.mutants import MUTANTS, Mutant

TRIES = 12
"""Number of seeds, one of which must expose the bug. The effect of a seed changes whenever the shipped code does."""


def test_every_rule_names_a_planted_bug() -> None:
    named = {rule for mutant in MUTANTS for rule in mutant.rules}
    assert {rule.name for rule in (*FileRule, *AuditRule, *Rule)} == named


@pytest.mark.timeout(900)  # up to ``TRIES`` seeds, possibly on a shared processor
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name.replace(" ", "_"))
def test_a_planted_bug_is_named_by_a_rule(mutant: Mutant) -> None:
    seen: list[list[tuple[str, str]]] = []
    for seed in range(mutant.seed, mutant.seed + TRIES):
        plan = mutant.plan(seed)
        with mutant.planted():
            seen.append(run_plan(plan, mutant.events).violations)
        if {rule for rule, _ in seen[-1]} & mutant.rules:
            if mutant.kinds:  # test_seeds runs the unmodified plans of seeds
                assert run_plan(plan, mutant.events).violations == [], "the same run without the bug"
            return
    pytest.fail(f"no rule of {', '.join(sorted(mutant.rules))} named it: {[found[:3] for found in seen]}")
