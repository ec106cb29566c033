"""Groups that move repeatedly between two rollout processes keep the content that their lease and versions require.

Every group that reaches the reward stage is compared with its expected samples: the draws of the lease under which it
started, and each token written by the version that its segments name.
"""

import asyncio
import subprocess
import sys
from collections.abc import AsyncGenerator, Collection
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from staleflow.clients.rollout.engines.running_batch import uniforms
from staleflow.clients.rollout.groups import Recipe
from staleflow.configs.schema import Config
from staleflow.protocols.consistency.ids import LeaseId, WorkerId
from staleflow.protocols.coordination import migration
from staleflow.protocols.coordination.view import Move, Snapshot
from staleflow.protocols.wire.messages import Assign
from staleflow.protocols.wire.tensors import unpack
from staleflow.protocols.wire.trajectory import Finish, GroupPayload
from tests.clients.rollout.peers import assign
from tests.process.running import audited
from tests.servers.running import WEIGHTS, Run, StageWorker, eventually

pytestmark = pytest.mark.xdist_group("machine")

STEPS = 6


def forced(snapshot: Snapshot, gap: float, given: Collection[WorkerId]) -> list[Move]:
    """Move every group to the other instance once it has been in one place for a moment."""
    places = [i.worker for i in snapshot.instances]
    return [
        Move(group=flight.group, lease=flight.lease, worker=flight.worker, to=to)
        for flight in snapshot.flights
        for to in places
        if to != flight.worker and flight.age_ms > 100
    ]


class Scene:
    """A run with its servers on this loop, rollout processes, a reward worker and a trainer."""

    def __init__(self, run_dir: Path, **sections: dict[str, Any]) -> None:
        rollout = {
            "simulated": {"mean_tokens": 300, "sigma": 0.5, "k2": 0.003},
            "max_new_tokens": 1000,
            "max_inflight": 6,
            "redundancy": {"samples": 1.5},
        }
        fixed: dict[str, dict[str, Any]] = {
            "rollout": rollout | sections.pop("rollout", {}),
            "coordination": {"migration": "idle"},
            "scheduler": {"map_mb": 16, "lease_s": 4.0},
        }
        self.run = Run(run_dir, **fixed | sections)
        self.checked = 0
        self.resumed: list[list[int]] = []
        """For each group pushed under a later lease than it started under: the versions that wrote it."""
        self._children: dict[str, subprocess.Popen[bytes]] = {}

    def worker(self, name: str) -> None:
        command = [sys.executable, "-m", "tests.process.marked_engine", str(self.run.run_dir), name]
        self._children[name] = subprocess.Popen(command)

    def kill(self, name: str) -> None:
        self._children[name].kill()
        self._children.pop(name).wait()

    async def reward(self) -> None:
        """Check every group and pass all of them on for training."""
        stage = StageWorker(self.run)
        while True:
            items, frames = await stage.take()
            for item in items:
                payload = GroupPayload.from_arrays(unpack(frames.pop(0)))
                origin = check(self.run.config, payload, item.row["prompt"], assign(item.group, item.lease))
                self.checked += 1
                if origin != item.lease:
                    self.resumed.append([segment.version for segment in payload.segment_summary()])
            if items:
                await stage.finish(items)

    async def train(self, middle: Any = None) -> None:
        """Train all steps; await ``middle`` after a third of them."""
        trainer = await self.run.trainer()
        await trainer.publish(0, WEIGHTS)
        for step in range(STEPS):
            batch = await trainer.next_batch(step)
            await trainer.publish(step + 1, WEIGHTS, batch.batch)
            if step == STEPS // 3 and middle is not None:
                await middle()

    async def moves(self) -> int:
        found: int = (await self.run.status(self.run.where.scheduler))["totals"]["moves"]
        return found

    async def close(self) -> None:
        for name in list(self._children):
            self.kill(name)
        await self.run.close()


def check(config: Config, payload: GroupPayload, prompt: str, lease: Assign) -> int:
    """Return the lease under which the group started.

    Fails unless all samples are draws of that lease and every segment names the version that wrote it.
    """
    recipe = Recipe.of(config)
    assert bytes(payload.prompt_ids.tolist()).decode() == prompt
    assert set(payload.finish.tolist()) <= {Finish.STOP, Finish.LENGTH}, "nothing was cut off"
    drawn, versions = payload.token_ids % 256, payload.token_ids // 256
    written = payload.token_ids > 0
    np.testing.assert_array_equal(versions[written], payload.token_versions()[written])
    samples = np.split(drawn[written], np.cumsum([part.sum() for part in np.split(written, ends(payload))])[:-1])
    for origin in range(lease.lease, 0, -1):
        seeds = [recipe.sample_seed(lease, sample, LeaseId(origin)) for sample in range(recipe.started)]
        found = [[np.array_equal(tokens, draws(seed, len(tokens))) for seed in seeds] for tokens in samples]
        if np.sum(found, axis=1).tolist() == [1] * len(samples) and np.sum(found, axis=0).max() == 1:
            return origin
    raise AssertionError(f"group {lease.group}, lease {lease.lease}: these tokens are no lease's")


def ends(payload: GroupPayload) -> list[int]:
    """End offset of each sample except the last."""
    found: list[int] = np.cumsum(payload.lengths)[:-1].tolist()
    return found


def draws(seed: int, count: int) -> np.ndarray[Any, Any]:
    """Tokens that the simulated engine writes for a seed."""
    uniform = uniforms(np.full(count, seed, np.uint64), np.arange(count, dtype=np.int64))
    return 1 + (uniform * 255).astype(np.int64)


@asynccontextmanager
async def playing(run_dir: Path, **sections: dict[str, Any]) -> AsyncGenerator[Scene]:
    scene = Scene(run_dir, **sections)
    scene.run.scheduler()
    scene.run.process("trajectories", 0)
    scene.run.parameters()
    for name in ("rollout-0", "rollout-1"):
        scene.worker(name)
    rewarding = asyncio.ensure_future(scene.reward())
    try:
        yield scene
        assert not rewarding.done(), rewarding.result()
    finally:
        rewarding.cancel()
        await asyncio.gather(rewarding, return_exceptions=True)
        await scene.close()


@pytest.fixture(autouse=True)
def force(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(migration.MIGRATIONS, "idle", forced)


async def test_groups_that_change_places_all_the_time_are_trained_as_if_they_had_not(run_dir: Path) -> None:
    async with playing(run_dir) as scene:
        await scene.train()
        moves = await scene.moves()
        assert scene.checked >= STEPS * 2
    assert moves >= 10
    assert len(scene.resumed) >= 5
    assert any(len(versions) > 1 for versions in scene.resumed), "some went on with newer weights"
    events = audited(run_dir, f"consume={STEPS}", f"push={STEPS * 2}")
    assert events["release:aborted"] >= moves


@pytest.mark.parametrize("victim", ["rollout-0", "trajectories-0", "scheduler"])
async def test_whoever_dies_on_the_way_nothing_wrong_is_trained(run_dir: Path, victim: str) -> None:
    async with playing(run_dir) as scene:

        async def die() -> None:
            await eventually(lambda: _at_least(scene, 3))
            match victim:
                case "rollout-0":
                    scene.kill(victim)
                    scene.worker(victim)
                case "trajectories-0":
                    scene.run.kill(victim)
                    scene.run.process("trajectories", 0)
                case _:  # stopped without notice, but on this loop: the test provides its strategy
                    await scene.run.stop(victim)
                    scene.run.scheduler()

        await scene.train(die)
        assert await scene.moves() >= 3
        assert scene.resumed
    audited(run_dir, f"consume={STEPS}")


async def _at_least(scene: Scene, count: int) -> bool:
    return await scene.moves() >= count
