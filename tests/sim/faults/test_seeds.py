"""In twenty runs full of faults, no acknowledged data is lost, no wrong data is served, and no run stalls.

Each run consists of the shipped servers and clients in virtual time. A failure prints the seed, the command that
reproduces it, and the story of the group. ``make soak`` runs the same test with far more events.
"""

import functools
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from staleflow.sim.faults.__main__ import describe
from staleflow.sim.faults.plan import KINDS
from staleflow.sim.faults.reconcile import Rule
from staleflow.sim.faults.run import Outcome, run_seed
from staleflow.trace.audit.report import FileRule
from staleflow.trace.audit.state import Rule as AuditRule

SEEDS = range(1, 21)
EVENTS = 10_000
"""Number of trace lines after which the faults of a run stop."""
CODES = ("stale_lease", "duplicate", "fenced", "busy", "bad_version", "stale", "malformed")
ROLES = ("scheduler", "trajectories", "parameters", "rollout", "stage", "trainer", "relay")
WAYS = ("near: mapped", "far: mapped", "far: over the network")

pytestmark = [
    pytest.mark.xdist_group("faults"),
    pytest.mark.timeout(900),
]  # a seed needs 30 s of a processor, which may be shared


@functools.cache
def outcome(seed: int) -> Outcome:
    return run_seed(seed, EVENTS)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_run_full_of_faults_keeps_every_promise(seed: int) -> None:
    found = outcome(seed)
    assert found.ok, describe(found)
    assert found.events >= EVENTS


def test_every_fault_happened_and_every_rule_had_something_to_check() -> None:
    faults, checks, counts = Counter[str](), Counter[str](), Counter[str]()
    for seed in SEEDS:
        faults += outcome(seed).faults
        checks += outcome(seed).checks
        counts += outcome(seed).counts
    assert [kind for kind in KINDS if not faults[kind]] == []
    rules = [rule.name for rule in (*FileRule, *AuditRule, *Rule)]
    assert [rule for rule in rules if not checks[rule]] == []
    assert [role for role in ROLES if not faults[f"stopped: {role}"]] == []
    told_codes = {code: counts[f"trace: reject:{code}"] for code in CODES}
    assert [code for code, count in told_codes.items() if not count] == []
    assert counts["push refused: stale_lease"] >= 20
    assert counts["push refused: conflict"] >= 5
    assert counts["disk: killed after a commit"] >= 5
    assert counts["disk: killed before a commit"] >= 5
    assert counts["a trainer was fenced"] >= 5
    assert counts["trace: rollback"] >= 5
    assert counts["trace: claim"] >= 50
    assert counts["a step began again"] >= 1
    assert counts["a group could not be trained"] >= 5
    assert counts["a step waited for the version before"] >= 5
    assert [code for code in ("bad_version", "conflict") if counts[f"a false report: {code}"] < 5] == []
    assert counts["a term that nobody was given: denied"] >= 5
    assert [what for what in ("killed: relay", "stopped: relay") if faults[what] < 3] == []
    assert counts["a relay below a relay"] >= 20
    assert [way for way in ("in a slab", "in frames") if counts[f"pushed {way}"] < 1_000] == []
    assert [who for who in ("shard", "reader", "writer") if counts[f"machine: slabs mapped by a {who}"] < 50] == []
    assert [what for what in ("slab deleted", "flipped in a slab") if not counts[f"disk: {what}"]] == []
    assert [way for way in WAYS if counts[f"weights, {way}"] < 50] == []
    assert [
        where
        for where in ("stage", "trainer", "rollout: weights", "rollout: groups", "rollout: partials")
        if not counts[f"looked: {where}"]
    ] == []


def test_every_fault_is_named_on_the_page() -> None:
    page = (Path(__file__).parents[3] / "docs" / "fault-simulation.md").read_text()
    table = page.partition("\n## Faults\n")[2].partition("\n## ")[0]
    named = {part.strip() for part in re.split("[|,;:(]", table)}
    assert [kind for kind in KINDS if kind not in named] == []


def test_a_seed_is_the_same_run_whatever_the_order_of_hashes_and_whatever_ran_before() -> None:
    program = f"from staleflow.sim.faults.run import run_seed; print(run_seed(2, {EVENTS}).trace_hash)"
    environment = os.environ | {"PYTHONHASHSEED": "1"}
    run = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == outcome(2).trace_hash
    assert outcome(2).replay == f"python -m staleflow.sim.faults 2 --events {EVENTS}"
