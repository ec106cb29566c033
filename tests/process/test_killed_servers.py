"""Acknowledged data survives the death of any server at random instants under load, byte for byte."""

import signal
from pathlib import Path

import pytest

from tests.audit.reconcile import prove
from tests.process.kills import NO_STALE, Tally, campaign

pytestmark = pytest.mark.xdist_group("machine")


def proven(tally: Tally, rounds: int) -> None:
    """Check that nothing acknowledged is lost, that nothing unsent exists, and that the campaign is valid."""
    prove(tally.report, without=NO_STALE)
    assert tally.kills.total() == rounds
    assert len(tally.kills) == 4, "a server was spared"
    assert tally.events["consume"] > rounds


async def test_what_was_acknowledged_survives_twenty_kills(run_dir: Path) -> None:
    """Synced commits take longer, so more of the kills hit one; `make faults` also kills without syncing.

    Twenty random instants occasionally hit too few commits. Such a campaign proves nothing and is repeated.
    """
    for seed in (1, 2, 3):
        tally = await campaign(run_dir.with_name(f"run-{seed}"), rounds=20, seed=seed, durability="power")
        proven(tally, 20)
        assert tally.events["open"] == 1 + tally.kills["scheduler"]
        if not tally.void:
            return
    pytest.fail("void: three campaigns hit too few commits")


async def test_a_server_that_drains_under_load_loses_and_doubles_nothing(run_dir: Path) -> None:
    tally = await campaign(run_dir, rounds=5, seed=2, number=signal.SIGTERM)
    proven(tally, 5)
    assert tally.codes == {0: 5}
    assert tally.events["close"] == 1 + tally.kills["scheduler"]
