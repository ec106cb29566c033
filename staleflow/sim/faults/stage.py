"""The simulated stages: the shipped stage worker, with a stage that checks what it gets and rewards by the seed."""

import asyncio
import random
from collections.abc import Sequence
from typing import ClassVar

from staleflow.clients.attachment import attach
from staleflow.clients.stage.worker import Failed, Made, StageGroup, StageWorker
from staleflow.configs.stages import graph
from staleflow.protocols.wire.messages import Attach
from staleflow.runtime.client import Client, worker_id
from staleflow.sim.faults.payload import made_by
from staleflow.sim.faults.scene import Scene
from staleflow.sim.faults.virtual import Process

GROUP_S = 0.01
SLOW_S = 2.0
SLOW_SHARE = 0.02
FAILED_SHARE = 0.003
MOST_GROUPS = 8


class CheckedStage:
    """Columns that are a function of the group's lease; a few groups cannot be judged, and some take long."""

    together: ClassVar[bool] = False

    def __init__(self, scene: Scene, stage: str) -> None:
        self._scene = scene
        self._stage = stage
        self._needs = {name for node in graph(scene.config) if node.name == stage for name in node.needs}
        self._rng = random.Random(scene.rng.getrandbits(64))

    async def make(self, groups: Sequence[StageGroup]) -> Sequence[Made]:
        await asyncio.sleep(SLOW_S if self._rng.random() < SLOW_SHARE else GROUP_S * len(groups))
        return [self._one(group) for group in groups]

    def _one(self, group: StageGroup) -> Made:
        scene, payload = self._scene, group.payload
        scene.journal.looked["stage"] += 1
        if not scene.journal.was_pushed(group.group, payload):
            scene.journal.wrong.append(f"a stage got bytes of group {group.group} that nobody wrote")
        if self._rng.random() < FAILED_SHARE:
            return Failed("it cannot be judged")
        if set(payload.stages) != self._needs:
            found = ", ".join(payload.stages) or "no columns"
            scene.journal.wrong.append(f"the stage {self._stage} got {found} of group {group.group}")
        return made_by(self._stage, payload)

    async def accepted(self, groups: Sequence[StageGroup]) -> None:
        """Nobody waits for that here."""


async def run_stage(scene: Scene, process: Process, name: str, stage: str) -> None:
    """One worker of a stage, until its process ends."""
    me, transport = worker_id(name), scene.network.transport(process)
    scheduler = Client(scene.where.scheduler, worker=me, transport=transport)
    await attach(scheduler, Attach(worker=me, name=name, role="stage", stage=stage))
    shards = [Client(address, worker=me, transport=transport) for address in scene.where.trajectories]
    worker = StageWorker(worker=me, name=stage, stage=CheckedStage(scene, stage), max_groups=MOST_GROUPS)
    await worker.serve(shards)
