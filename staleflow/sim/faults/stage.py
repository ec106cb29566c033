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
from staleflow.sim.faults.journal import FailedStage
from staleflow.sim.faults.payload import always_fails, columns_of
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

    async def make(self, groups: Sequence[StageGroup]) -> Sequence[StageOutcome]:
        for group in groups:
            self._scene.journal.tried_stages.setdefault(group.group, set()).add(self._name)
        await asyncio.sleep(SLOW_S if self._rng.random() < SLOW_SHARE else GROUP_S * len(groups))
        return [self._one(group) for group in groups]

    def _one(self, group: StageGroup) -> StageOutcome:
        scene, payload = self._scene, group.payload
        scene.journal.checked["stage"] += 1
        if not scene.journal.was_pushed(group.group, payload):
            scene.journal.mismatches.append(f"a stage got bytes of group {group.group} that no worker wrote")
        if (broken := self._name in scene.broken) or always_fails(group.group):
            scene.journal.failed_stages.setdefault(group.group, []).append(FailedStage(self._name, broken=broken))
            return Failed("this worker is broken" if broken else "it cannot be judged")
        if set(payload.stages) != self._needs:
            columns = ", ".join(payload.stages) or "no columns"
            scene.journal.mismatches.append(f"the stage {self._stage} got {columns} of group {group.group}")
        return columns_of(self._stage, payload)

    async def accepted(self, groups: Sequence[StageGroup]) -> None:
        """Do nothing: no process waits for this here."""


class TogetherStage(CheckedStage):
    """A ``CheckedStage`` that makes all groups of a call at once."""

    together: ClassVar[bool] = True


@asynccontextmanager
async def opened_stage(scene: Scene, stage: str, name: str) -> AsyncGenerator[tuple[Stage, int]]:
    """Open a stage in virtual time, as the shipped worker ``name`` opens its own."""
    yield (TogetherStage if stage == REFERENCE else CheckedStage)(scene, stage, name), 0
