"""In runs full of faults, no acknowledged data is lost, no wrong data is served, and no run stalls.

Each run consists of the shipped servers and clients in virtual time. A failure prints the seed, the command that
reproduces it, and the story of the group. ``make test-long`` runs more seeds, ``make soak`` many more and longer ones.
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

SEEDS = (1, 3, 5, 12, 18, 19, 32)
"""Seeds of ``make test``: together they have every fault, and something to check for every rule."""
MORE_SEEDS = tuple(seed for seed in range(1, 21) if seed not in SEEDS)
CASES = [*SEEDS, *(pytest.param(seed, marks=pytest.mark.long) for seed in MORE_SEEDS)]
EVENTS = 4_000
"""Number of trace lines after which the faults of a run stop."""
CODES = ("stale_lease", "duplicate", "fenced", "busy", "bad_version", "stale", "malformed")
ROLES = ("scheduler", "trajectories", "parameters", "rollout", "stage", "trainer", "relay")
WAYS = ("near: mapped", "far: mapped", "far: over the network")
READERS = ("stage", "trainer", "rollout: weights", "rollout: groups", "rollout: partials")

NEEDED = {
    **{("faults", kind): 1 for kind in KINDS},
    **{("checks", rule.name): 1 for rule in (*FileRule, *AuditRule, *Rule)},
    **{("faults", f"stopped: {role}"): 1 for role in ROLES},
    **{("faults", f"{what}: relay"): 3 for what in ("killed", "stopped")},
    **{("counts", f"trace: reject:{code}"): 1 for code in CODES},
    ("counts", "push refused: stale_lease"): 20,
    ("counts", "push refused: conflict"): 5,
    ("counts", "disk: killed after a commit"): 5,
    ("counts", "disk: killed before a commit"): 5,
    ("counts", "a trainer was fenced"): 5,
    ("counts", "trace: rollback"): 5,
    ("counts", "trace: claim"): 50,
    ("counts", "a step began again"): 1,
    ("counts", "a group could not be trained"): 5,
    ("counts", "a step waited for the version before"): 5,
    **{("counts", f"a false report: {code}"): 5 for code in ("bad_version", "conflict")},
    ("counts", "a term that nobody was given: denied"): 5,
    ("counts", "a relay below a relay"): 20,
    **{("counts", f"pushed {way}"): 1_000 for way in ("in a slab", "in frames")},
    **{("counts", f"machine: slabs mapped by a {who}"): 50 for who in ("shard", "reader", "writer")},
    **{("counts", f"disk: {what}"): 1 for what in ("slab deleted", "flipped in a slab")},
    **{("counts", f"weights, {way}"): 50 for way in WAYS},
    **{("counts", f"looked: {where}"): 1 for where in READERS},
}
"""Minimum of each counter of ``Outcome`` over all runs."""

pytestmark = pytest.mark.xdist_group("faults")


@functools.cache
def outcome(seed: int) -> Outcome:
    return run_seed(seed, EVENTS)


@pytest.mark.parametrize("seed", CASES)
def test_a_run_full_of_faults_keeps_every_promise(seed: int) -> None:
    found = outcome(seed)
    assert found.ok, describe(found)
    assert found.events >= EVENTS


def test_every_fault_happened_and_every_rule_had_something_to_check() -> None:
    """A change of the shipped code changes what happens in a seed: more seeds follow if ``SEEDS`` lack something."""
    totals = Counter[tuple[str, str]]()
    missing = list(NEEDED)
    for seed in (*SEEDS, *MORE_SEEDS):
        for field in ("faults", "checks", "counts"):
            totals += Counter({(field, name): n for name, n in getattr(outcome(seed), field).items()})
        missing = [name for name, minimum in NEEDED.items() if totals[name] < minimum]
        if not missing:
            return
    pytest.fail(f"too rare: {[(name, totals[name], NEEDED[name]) for name in missing]}")


def test_every_fault_is_named_on_the_page() -> None:
    page = (Path(__file__).parents[3] / "docs" / "fault-simulation.md").read_text()
    table = page.partition("\n## Faults\n")[2].partition("\n## ")[0]
    named = {part.strip() for part in re.split("[|,;:(]", table)}
    assert [kind for kind in KINDS if kind not in named] == []


def test_a_seed_is_the_same_run_whatever_the_order_of_hashes_and_whatever_ran_before() -> None:
    seed = 12
    program = f"from staleflow.sim.faults.run import run_seed; print(run_seed({seed}, {EVENTS}).trace_hash)"
    environment = os.environ | {"PYTHONHASHSEED": "1"}
    run = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == outcome(seed).trace_hash
    assert outcome(seed).replay == f"python -m staleflow.sim.faults {seed} --events {EVENTS}"
