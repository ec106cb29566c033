"""A run survives rollout workers that are killed, or stopped until their leases expire and then resumed."""

import asyncio
import json
import math
import signal
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.audit import journal
from tests.audit.reconcile import Rule, prove, reconcile
from tests.process.actors import Rewarder, Trainer
from tests.process.fleet import Fleet
from tests.process.running import END_S, audited

pytestmark = pytest.mark.xdist_group("machine")

LEASE_S = 2.0
ZOMBIES = 20
"""Minimum number of late pushes; with fewer, the test is void."""


def trace(fleet: Fleet) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (fleet.run_dir / "trace.jsonl").read_bytes().split(b"\n")[:-1]]


def codes(fleet: Fleet, name: str) -> list[str]:
    """Reply codes to the pushes of a worker."""
    entries = journal.read(fleet.journals).get(name, [])
    return [entry["code"] for entry in entries if entry["what"] == "answered"]


def held(fleet: Fleet, name: str) -> int:
    """Number of leases that a worker has received without pushing."""
    entries = journal.read(fleet.journals).get(name, [])
    return sum({"leased": 1, "sent": -1}.get(entry["what"], 0) for entry in entries)


def expired(fleet: Fleet, since_ns: int, before_ns: float = math.inf) -> list[dict[str, Any]]:
    """Release events of leases that were not renewed in time."""
    released = [e for e in trace(fleet) if e["ev"] == "release" and e["why"] == "expired"]
    return [e for e in released if since_ns < e["t"] < before_ns]


def served_again(fleet: Fleet, gone: list[dict[str, Any]]) -> bool:
    """Return whether the group of each of these leases has a later lease."""
    served = {(e["group"], e["lease"]) for e in trace(fleet) if e["ev"] == "reserve"}
    return all(any(group == e["group"] and lease > e["lease"] for group, lease in served) for e in gone)


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(END_S):
        while not true():  # noqa: ASYNC110
            await asyncio.sleep(0.05)


@asynccontextmanager
async def training(fleet: Fleet) -> AsyncGenerator[Trainer]:
    """Score and train every pushed group while the context is open."""
    rewarders = [Rewarder(fleet.run_dir, f"reward-{shard}", shard=shard) for shard in range(len(fleet.shards))]
    trainer = Trainer(fleet.run_dir, "trainer")
    actors: list[Trainer | Rewarder] = [trainer, *rewarders]
    work = [asyncio.ensure_future(actor.run()) for actor in actors]
    try:
        yield trainer
        assert not any(task.done() for task in work)
    finally:
        for task in work:
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)
        for actor in actors:
            await actor.close()


async def test_zombies_and_the_dead_cost_no_group_and_bring_nothing_in(run_dir: Path) -> None:
    small: dict[str, dict[str, Any]] = {"scheduler": {"lease_s": LEASE_S}, "trainer": {"batch_size": 16}}
    async with Fleet(run_dir, **small) as fleet, training(fleet) as trainer:
        for name in ("rollout-0", "rollout-1"):
            fleet.act("rollout", name, capacity=24, hold_s=0.4, stubborn=1)
        await until(lambda: trainer.version >= 2)
        while codes(fleet, "rollout-0").count("stale_lease") < ZOMBIES:
            await until(lambda: held(fleet, "rollout-0") >= 8)
            fleet.signal("rollout-0", signal.SIGSTOP)
            await asyncio.sleep(LEASE_S + 1.5)
            fleet.signal("rollout-0", signal.SIGCONT)
            await asyncio.sleep(1.0)
        await until(lambda: held(fleet, "rollout-1") >= 8)
        fleet.kill("rollout-1")
        died = time.time_ns()
        await until(lambda: len(expired(fleet, died)) >= 4)
        fleet.act("rollout", "rollout-1", capacity=24, stubborn=1)
        version = trainer.version
        await until(lambda: trainer.version >= version + 3)
        stopped = time.time_ns()  # what expires later may have no worker left to serve it again
        await until(lambda: trainer.version >= version + 4 and served_again(fleet, expired(fleet, died, stopped)))
        for name in ("rollout-0", "rollout-1"):
            fleet.kill(name)
        for name in reversed(fleet.servers):
            assert (await fleet.end(name))[0] == 0, fleet.said(name)
    events, gone = trace(fleet), expired(fleet, died, stopped)
    lost = {e["lease"] for e in expired(fleet, died)}
    assert not [e for e in events if e["ev"] == "push" and e["lease"] in lost]
    assert served_again(fleet, gone)
    report = reconcile(fleet.journals, run_dir / "trace.jsonl", fleet.stores, seed=fleet.config.seed)
    prove(report, without=(Rule.REDELIVERED, Rule.REFUSED_FENCED))
    assert report.checks[Rule.ZOMBIE_NEVER] >= ZOMBIES
    assert report.checks[Rule.SERVED_AGAIN] >= len(gone)
    audited(run_dir, f"release={len(gone)}")
