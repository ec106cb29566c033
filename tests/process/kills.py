"""Fault campaign: servers end at random instants under load, repeatedly, and the witnesses' journals are audited."""

import asyncio
import json
import random
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from staleflow.configs.schema import Durability
from tests.audit import journal, stores
from tests.audit.reconcile import Report, Rule, reconcile
from tests.process.actors import Rewarder, Rollout, Trainer
from tests.process.fleet import Fleet
from tests.process.running import audited

IN_DOUBT = 0.25
"""A campaign is void unless at least this share of its kills left a committed, unacknowledged operation."""
PROGRESS_S = 120.0
"""Time limit after a restart for the next acknowledged pushes."""
Doubt = tuple[str | int, ...]
"""An operation of the protocol: its name and its arguments."""
HOLD_S = 0.1
"""Time between a lease and its push, which spreads pushes evenly over time and avoids bursts."""
SETTLE_S = 0.1
"""Replies that were in flight when a server died arrive within this time."""
NO_STALE = (Rule.ZOMBIE_NEVER, Rule.SERVED_AGAIN, Rule.REDELIVERED, Rule.REFUSED_FENCED)
"""Rules that apply only if a worker or a trainer fails."""


@dataclass(slots=True)
class Tally:
    """Results of a campaign."""

    kills: Counter[str] = field(default_factory=Counter[str])
    in_doubt: list[int] = field(default_factory=list[int])
    """Number of committed, unacknowledged operations per kill, without those of earlier kills."""
    doubtful_kills: Counter[str] = field(default_factory=Counter[str])
    """Number of kills per server that left a committed, unacknowledged operation."""
    restart_s: list[float] = field(default_factory=list[float])
    """Time from the start of each process to its first reply."""
    end_s: list[float] = field(default_factory=list[float])
    """Time from each SIGTERM to the exit of the process."""
    codes: Counter[int] = field(default_factory=Counter[int])
    events: Counter[str] = field(default_factory=Counter[str])
    report: Report = field(default_factory=Report)
    acknowledged: int = 0
    wall_s: float = 0.0

    @property
    def doubtful(self) -> float:
        """Share of kills that left something committed and unacknowledged."""
        return self.doubtful_kills.total() / max(len(self.in_doubt), 1)

    @property
    def void(self) -> bool:
        """True if too few kills hit a commit, or if no kill of a shard did."""
        return self.doubtful < IN_DOUBT or not any(name.startswith("trajectories") for name in +self.doubtful_kills)


class Campaign:
    """One run under load, whose servers the campaign ends."""

    def __init__(self, fleet: Fleet, seed: int) -> None:
        self._fleet = fleet
        self._random = random.Random(seed)
        run_dir = fleet.run_dir
        self._rollouts = [Rollout(run_dir, f"rollout-{n}", capacity=64, hold_s=HOLD_S) for n in range(2)]
        rewarders = [Rewarder(run_dir, f"reward-{shard}", shard=shard) for shard in range(len(fleet.shards))]
        self._trainer = Trainer(run_dir, "trainer")
        self._actors: list[Rollout | Rewarder | Trainer] = [self._trainer, *self._rollouts, *rewarders]
        self._work: list[asyncio.Task[None]] = []
        self._doubted: set[Doubt] = set()
        self.tally = Tally()

    async def run(self, rounds: int, number: signal.Signals) -> Tally:
        """End servers ``rounds`` times in total, each server equally often."""
        started = time.monotonic()
        self._work = [asyncio.ensure_future(actor.run()) for actor in self._actors]
        deck: list[str] = []
        try:
            await self._progress(40)
            for _ in range(rounds):
                deck = deck or self._random.sample(self._fleet.servers, k=len(self._fleet.servers))
                await asyncio.sleep(self._random.uniform(0.0, 0.4))
                await self._once(deck.pop(), number)
            await self._progress(100)
        finally:
            for task in self._work:
                task.cancel()
            await asyncio.gather(*self._work, return_exceptions=True)
            for actor in self._actors:
                await actor.close()
        self.tally.wall_s = time.monotonic() - started
        self.tally.acknowledged = sum(rollout.counts["acknowledged"] for rollout in self._rollouts)
        return self.tally

    async def _once(self, name: str, number: signal.Signals) -> None:
        self.tally.kills[name] += 1
        if number == signal.SIGKILL:
            self._fleet.kill(name)
            await asyncio.sleep(SETTLE_S)
            new = await asyncio.to_thread(in_doubt, self._fleet, name) - self._doubted
            self._doubted |= new
            self.tally.in_doubt.append(len(new))
            self.tally.doubtful_kills[name] += bool(new)
        else:
            code, took_s = await self._fleet.end(name)
            self.tally.codes[code] += 1
            self.tally.end_s.append(took_s)
        self._fleet.start(name)
        self.tally.restart_s.append(await self._fleet.answers(name))
        await self._progress(48)

    async def _progress(self, pushes: int) -> None:
        """Wait until ``pushes`` more pushes are acknowledged and one more version is published."""
        goal = sum(rollout.counts["acknowledged"] for rollout in self._rollouts) + pushes
        version = self._trainer.version + 1
        deadline = time.monotonic() + PROGRESS_S
        while sum(rollout.counts["acknowledged"] for rollout in self._rollouts) < goal or (
            self._trainer.version < version
        ):
            for task in self._work:
                if task.done():
                    task.result()
            assert time.monotonic() < deadline, f"no progress: {self._fleet.status('scheduler')['why']}"
            await asyncio.sleep(0.01)


def in_doubt(fleet: Fleet, name: str) -> set[Doubt]:
    """Compare a dead server's store with all journals; return the committed, unacknowledged operations."""
    entries = [entry for entries in journal.read(fleet.journals).values() for entry in entries]
    told: set[Doubt] = {("push", e["group"], e["lease"]) for e in entries if e["what"] == "answered"}
    done = set[Doubt]()
    if name.startswith("trajectories"):
        done.update(("push", *key) for key in stores.read_shard(fleet.run_dir / name))
        return done - told
    told.update(("publish", e["lineage"], e["version"]) for e in entries if e["what"] == "published")
    if name == "parameters":
        done.update(("publish", *key) for key in stores.versions_in(fleet.run_dir / name))
        return done - told
    told.update(("reserve", e["lease"]) for e in entries if e["what"] == "leased")
    trace = (fleet.run_dir / "trace.jsonl").read_bytes().split(b"\n")[:-1]
    for event in map(json.loads, trace):
        match event["ev"]:
            case "push":
                done.add(("push", event["group"], event["lease"]))
            case "reserve":
                done.add(("reserve", event["lease"]))
            case "publish":
                done.add(("publish", event["lineage"], event["version"]))
            case _:
                pass
    return done - told


async def campaign(
    run_dir: Path,
    *,
    rounds: int,
    seed: int,
    number: signal.Signals = signal.SIGKILL,
    durability: Durability = "process",
) -> Tally:
    """Run under load, end servers ``rounds`` times, and reconcile all accounts of the run with each other."""
    kept = {name: {"durability": durability} for name in ("scheduler", "trajectories", "parameters")}
    async with Fleet(run_dir, **kept) as fleet:
        tally = await Campaign(fleet, seed).run(rounds, number)
        for name in reversed(fleet.servers):  # stop the scheduler last
            code, _ = await fleet.end(name)
            assert code == 0, fleet.said(name)
    tally.report = reconcile(fleet.journals, run_dir / "trace.jsonl", fleet.stores, seed=fleet.config.seed)
    tally.events = Counter(audited(run_dir))
    return tally
