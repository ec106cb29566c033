"""A run survives a trainer that dies at any point of a step, resumes from older checkpoints, or meets its successor."""

import asyncio
import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.audit import journal
from tests.audit.reconcile import Rule, prove, reconcile
from tests.process.actors import FENCED_EXIT, Rewarder, Rollout
from tests.process.fleet import Fleet
from tests.process.running import END_S, audited
from tests.process.test_killed_workers import until

pytestmark = pytest.mark.xdist_group("machine")

KEPT = 0.95
"""Share of the still usable groups that a rollback must keep."""
DEATHS: tuple[dict[str, Any], ...] = (
    {"checkpoint_every": 1, "die": "delivered", "at": 3},
    {"checkpoint_every": 1, "die": "stepped", "at": 5},
    {"checkpoint_every": 1, "die": "published", "at": 7},  # resumes at 7 and finds 8: rolls back
    {"checkpoint_every": 4, "die": "delivered", "at": 15},  # resumes at 12
)


def kept_by_rollbacks(events: list[dict[str, Any]]) -> tuple[int, int]:
    """Return (groups still usable at a rollback, those of them that the rollback kept), summed over all rollbacks.

    A group is still usable if it is live, or trained since the version that the rollback returns to, and has no token
    of a later version.
    """
    newest: dict[int, int] = {}
    """Newest version that wrote a token of each live group."""
    trained: dict[int, list[int]] = {}
    seals: dict[int, dict[str, Any]] = {}
    fits, kept, settling = 0, 0, dict[int, bool]()
    for event in events:
        if settling and not (event["ev"] in ("release", "drop") and event["why"] == "rollback"):
            kept += sum(settling.values())
            settling = {}
        match event["ev"]:
            case "reserve":
                newest[event["group"]] = event["version"]
            case "push":
                newest[event["group"]] = max(segment["version"] for segment in event["segments"])
            case "release" | "drop":
                newest.pop(event["group"], None)
                settling[event["group"]] = False
            case "seal":
                seals[event["batch"]] = event
            case "consume":
                trained[event["step"]] = [member["group"] for member in seals[event["batch"]]["members"]]
            case "rollback":
                back = event["to_version"]
                for step in [step for step in trained if step < back]:
                    for group in trained.pop(step):
                        newest.pop(group, None)
                settling = {group: True for group, version in newest.items() if version <= back}
                fits += len(settling)
            case _:
                pass
    return fits, kept


async def test_no_step_is_lost_or_doubled_wherever_the_trainer_dies(run_dir: Path) -> None:
    async with Fleet(run_dir, trainer={"batch_size": 8}) as fleet:
        actors: list[Rollout | Rewarder] = [Rollout(run_dir, f"rollout-{n}", hold_s=0.02) for n in range(2)]
        actors += [Rewarder(run_dir, f"reward-{n}", shard=n) for n in range(len(fleet.shards))]
        work = [asyncio.ensure_future(actor.run()) for actor in actors]
        for death in DEATHS:
            fleet.act("trainer", "trainer", **death)
            assert await fleet.ended("trainer", END_S) == -signal.SIGKILL, fleet.said("trainer")
        fleet.act("trainer", "trainer", checkpoint_every=4, think_s=0.05)
        await until(lambda: (fleet.status("scheduler")["version"]) >= 18)
        fleet.act("trainer", "trainer-b", checkpoint_every=1)
        assert await fleet.ended("trainer", END_S) == FENCED_EXIT, fleet.said("trainer")
        await until(lambda: fleet.status("scheduler")["version"] >= 24)
        fleet.kill("trainer-b")
        # leaves occupied groups for the audit to look up
        await until(lambda: fleet.status("scheduler")["ledger"]["occupied"] >= 8)
        for task in work:
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)
        for actor in actors:
            await actor.close()
        for name in reversed(fleet.servers):
            assert (await fleet.end(name))[0] == 0, fleet.said(name)
    report = reconcile(fleet.journals, run_dir / "trace.jsonl", fleet.stores, seed=fleet.config.seed)
    prove(report, without=(Rule.ZOMBIE_NEVER, Rule.SERVED_AGAIN))
    assert report.checks[Rule.REDELIVERED] >= len(DEATHS)
    told = {entry["op"]: entry["code"] for entry in journal.read(fleet.journals)["trainer"] if "op" in entry}
    assert told == dict.fromkeys(("seal", "publish", "consume", "checkpoint"), "fenced")
    fits, kept = kept_by_rollbacks([json.loads(line) for line in (run_dir / "trace.jsonl").read_text().splitlines()])
    assert fits >= 20, "void: nothing was there to be kept"
    assert kept >= KEPT * fits
    audited(run_dir, "rollback=2", f"join={len(DEATHS) + 2}")
