"""A run survives a worker with a valid lease that pushes foreign token ids and untrainable log-probabilities.

The shard rejects the first push. The second is acknowledged, quarantined and left out. The run trains every step, and
no process restarts.
"""

import asyncio
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.consistency.ids import GroupId, Lineage, Version
from staleflow.protocols.wire.messages import Assign, Detach, Done, Pulled, PushGroups, PushItem, Result, Results
from staleflow.protocols.wire.tensors import specs_and_frames
from tests.process import actors
from tests.process.running import END_S, Run, audited
from tests.servers.running import payload

pytestmark = pytest.mark.xdist_group("machine")

STEPS, GROUP_SIZE = 6, 4
LOSS = """
def careful(logprobs, old, behavior, advantages, row):
    if (behavior < -50).any():
        raise ValueError("a token of probability 0")
    return -(logprobs - old).exp() * advantages
"""
SMALL = (
    *("model.options.steps=10", f"trainer.steps={STEPS}", "trainer.eval_every=0", "trainer.eval_prompts=0"),
    *("rollout.filter=none", "rollout.workers=1"),
)
FOREIGN = 1_000_000
"""Token id of another tokenizer."""


class Answered(NamedTuple):
    """Results of both pushes of a group."""

    group: GroupId
    foreign: Result
    impossible: Result


class Poisoner(actors.Rollout):
    """Rollout worker that pushes a foreign token and, after the rejection, impossible log-probabilities."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__(run_dir, "poisoner", capacity=1, stubborn=True)
        self.answered: asyncio.Future[Answered] = asyncio.get_running_loop().create_future()
        self._lease: Assign | None = None

    async def _pull(self, lineage: Lineage, version: Version) -> None:
        async with await self._puller.pull(lineage, version) as pulled:
            sha = pulled.sha
        await self.scheduler.ask(Pulled(worker=self.me, lineage=lineage, version=version, sha=sha, ok=True), Done)
        async with self._turned:
            self._loaded = max(self._loaded, (lineage, version))
            self._turned.notify_all()
        self._news.set()

    async def _push(self, lease: Assign) -> None:
        async with self._turned:
            await self._turned.wait_for(lambda: self._loaded >= (lease.lineage, lease.version))
        if self._lease is not None:  # a later lease: the worker returns it when it detaches
            return
        self._lease = lease
        group = payload(lease.version, samples=GROUP_SIZE, tokens=3)
        group.token_ids[:] = 1
        group.token_ids[0] = FOREIGN
        foreign = await self._pushed(lease, group.to_arrays())
        group.token_ids[0] = 1
        group.logprobs[:] = -60.0
        impossible = await self._pushed(lease, group.to_arrays())
        self.answered.set_result(Answered(lease.group, foreign, impossible))

    async def _pushed(self, lease: Assign, arrays: dict[str, np.ndarray]) -> Result:
        specs, frames = specs_and_frames(arrays)
        item = PushItem(group=lease.group, lease=lease.lease, worker=self.me, truncated=False, frames=specs)
        return (await self.shards[lease.shard].ask(PushGroups(items=[item]), Results, frames)).results[0]


async def poison(run_dir: Path) -> Answered:
    """Run the poisoner; return the results of both pushes."""
    poisoner = Poisoner(run_dir)
    working = asyncio.create_task(poisoner.run())
    try:
        async with asyncio.timeout(END_S):
            await asyncio.wait((working, poisoner.answered), return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                working.result()
            answered = await poisoner.answered
        await poisoner.scheduler.ask(Detach(worker=poisoner.me, why="done"), Done)
        return answered
    finally:
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        await poisoner.close()


def test_a_foreign_token_is_refused_and_a_group_that_cannot_be_trained_costs_itself_only(run_dir: Path) -> None:
    users = run_dir.parent / "users.py"
    users.write_text(LOSS)
    with Run(run_dir, "smoke.toml", *SMALL, f"trainer.algorithm.loss={users}:careful") as run:
        run.wait_for("attach", 1, END_S, role="trajectories")
        group, refused, taken = asyncio.run(poison(run_dir))
        output = run.finish(END_S)
    assert refused.code is Code.MALFORMED
    assert f"token_ids holds {FOREIGN}; the model's vocabulary has " in refused.detail
    assert taken.code is None
    assert run.process.returncode == 0, output
    assert run.count("reject", op="push", code="malformed") == 1
    assert [(event["group"], event["why"]) for event in run.events() if event["ev"] == "drop"] == [
        (group, "quarantine")
    ]
    log = (run_dir / "logs" / "trainer.log").read_text()
    assert "ValueError: a token of probability 0" in log
    summary = run.summary()
    assert (summary["outcome"], summary["steps"], summary["violations"], summary["restarts"]) == (
        *("finished", STEPS, 0),
        {},
    )
    audited(run_dir, f"consume={STEPS}", "drop=1")
