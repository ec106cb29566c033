"""Stages of the simulation, called by the shipped stage worker: they check their input and derive columns from its
bytes."""

import asyncio
import random
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import ClassVar

from staleflow.clients.stage.worker import Failed, Stage, StageGroup, StageOutcome
from staleflow.configs.stages import graph
from staleflow.protocols.wire.stages import REFERENCE
from staleflow.servers.trajectories.stage_queue import HOLD_AFTER, MAX_HOLD_S
from staleflow.sim.faults.journal import FailedStage, stage_of
from staleflow.sim.faults.payload import always_fails, columns_of, sha_of
from staleflow.sim.faults.scene import Scene

GROUP_S = 0.01
SLOW_S = 2.0
SLOW_SHARE = 0.02


class CheckedStage:
    """Columns that are a function of the group's tokens; a few groups cannot be judged, and some take long."""

    together: ClassVar[bool] = False

    def __init__(self, scene: Scene, stage: str, name: str) -> None:
        self._scene = scene
        self._stage = stage
        self._name = name
        self._needs = {name for node in graph(scene.config) if node.name == stage for name in node.needs}
        self._rng = random.Random(scene.rng.getrandbits(64))
        self._failures = 0
        """Consecutive failures."""
        scene.journal.suspect_s.setdefault(name, -MAX_HOLD_S)

    async def make(self, groups: Sequence[StageGroup]) -> Sequence[StageOutcome]:
        for group in groups:
            self._scene.journal.tried_stages.setdefault(sha_of(group.payload), set()).add(self._name)
        await asyncio.sleep(SLOW_S if self._rng.random() < SLOW_SHARE else GROUP_S * len(groups))
        return [self._one(group) for group in groups]

    def _one(self, group: StageGroup) -> StageOutcome:
        scene, payload = self._scene, group.payload
        scene.journal.checked["stage"] += 1
        if not scene.journal.was_pushed(group.group, payload):
            scene.journal.mismatches.append(f"a stage got bytes of group {group.group} that no worker wrote")
        broken = self._name in scene.broken
        if broken or always_fails(group.group):
            self._failures += 1
            if broken or self._failures >= HOLD_AFTER:
                scene.journal.suspect_s[self._name] = scene.conductor.now_s
            failures = scene.journal.failed_stages.setdefault(sha_of(payload), [])
            failures.append(FailedStage(self._name, broken=broken and self._another_works()))
            return Failed("this worker is broken" if broken else "it cannot be judged")
        self._failures = 0
        if set(payload.stages) != self._needs:
            columns = ", ".join(payload.stages) or "no columns"
            scene.journal.mismatches.append(f"the stage {self._stage} got {columns} of group {group.group}")
        return columns_of(self._stage, payload)

    def _another_works(self) -> bool:
        """Return whether another worker of the stage is surely not held."""
        stage, held_s = stage_of(self._name), self._scene.conductor.now_s - MAX_HOLD_S
        suspects = self._scene.journal.suspect_s.items()
        return any(at_s < held_s for name, at_s in suspects if name != self._name and stage_of(name) == stage)

    async def accepted(self, groups: Sequence[StageGroup]) -> None:
        """Do nothing: no process waits for this here."""


class TogetherStage(CheckedStage):
    """A ``CheckedStage`` that makes all groups of a call at once."""

    together: ClassVar[bool] = True


@asynccontextmanager
async def opened_stage(scene: Scene, stage: str, name: str) -> AsyncGenerator[tuple[Stage, int]]:
    """Open a stage in virtual time, as the shipped worker ``name`` opens its own."""
    yield (TogetherStage if stage == REFERENCE else CheckedStage)(scene, stage, name), 0
