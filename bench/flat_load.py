"""All clients that a run of small trajectories needs around its servers: one producer, one reward worker, one trainer.

They do no work of their own: tokens are random, rewards differ, weights are a few numbers. The load exercises the
servers, with the messages of the shipped client.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np

from staleflow.clients.weights import Publisher
from staleflow.configs.loading.load import addresses, from_json, write_resolved
from staleflow.configs.schema import Config
from staleflow.net.client import Client, worker_id
from staleflow.protocols.consistency.ids import LeaseId, Lineage, Step, Version
from staleflow.protocols.wire.messages import (
    Assign,
    Attach,
    AttachReply,
    Batch,
    Commands,
    GetBatch,
    GetGroups,
    GetStageWork,
    Groups,
    InstanceStats,
    Join,
    JoinReply,
    Pull,
    PushGroups,
    PushItem,
    PutStageResults,
    RegisterCheckpoint,
    RegisterCheckpointReply,
    Report,
    Results,
    StageResult,
    StageWork,
    TensorSpec,
)
from staleflow.protocols.wire.tensors import Array, specs_and_frames
from staleflow.protocols.wire.trajectory import GroupPayload

GROUP_SIZE = 16
BATCH = 32
TOKENS = 64
"""Tokens of each trajectory."""
ROWS = 1_000
CHECKPOINT_EVERY = 4
AT_ONCE = 32
"""Groups of one message."""


def config_of(run_dir: Path, steps: int) -> Config:
    """Configuration of a run of that many steps, resolved in its directory."""
    prompts = run_dir / "prompts.jsonl"
    run_dir.mkdir(parents=True, exist_ok=True)
    prompts.write_bytes(b"".join(b'{"prompt": "%d"}\n' % number for number in range(ROWS)))
    table = {
        "prompts": {"path": str(prompts)},
        "reward": {"run": "staleflow.examples.quickstart.task:reward"},
        "staleness": {"max_staleness": 2},
        "rollout": {"engine": "simulated", "group_size": GROUP_SIZE, "max_inflight": GROUP_SIZE * BATCH * 3},
        "trainer": {"backend": "simulated", "batch_size": BATCH, "steps": steps},
        "scheduler": {"map_mb": 64},
        "trajectories": {"map_mb": 64},
    }
    config = from_json(msgspec.json.encode(table))
    write_resolved(config, run_dir)
    return config


class Load:
    """The three clients. ``trained`` counts trajectories."""

    def __init__(self, config: Config, run_dir: Path, on_step: Callable[[int], None]) -> None:
        self._steps = config.trainer.steps
        self._on_step = on_step
        where = addresses(config, run_dir)
        self._rollout, self._stage, self._trainer = (worker_id(name) for name in ("rollout-0", "reward-0", "trainer"))
        self._of_rollout = [
            Client(address, worker=self._rollout) for address in (where.scheduler, where.trajectories[0])
        ]
        self._of_stage = Client(where.trajectories[0], worker=self._stage)
        self._of_trainer = [
            Client(address, worker=self._trainer) for address in (where.scheduler, where.trajectories[0])
        ]
        self._publisher = Publisher(where.parameters, worker=self._trainer)
        self.trained = 0

    async def run(self, ended: Callable[[], str]) -> None:
        """Run until the last step is trained. ``RuntimeError`` when ``ended`` names a server."""

        async def watch() -> None:
            while not (name := ended()):  # noqa: ASYNC110
                await asyncio.sleep(0.5)
            raise RuntimeError(f"{name} has ended")

        working = [asyncio.create_task(work()) for work in (self._produce, self._judge, watch)]
        training = asyncio.create_task(self._train())
        try:
            done, _ = await asyncio.wait((*working, training), return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in (*working, training):
                task.cancel()
            await asyncio.gather(*working, training, return_exceptions=True)
            for client in (*self._of_rollout, self._of_stage, *self._of_trainer):
                client.close()
            self._publisher.close()

    async def _produce(self) -> None:
        scheduler, shard = self._of_rollout
        hello = Attach(worker=self._rollout, name="rollout-0", role="rollout", capacity=3 * BATCH)
        while not all((await scheduler.ask(hello, AttachReply, timeout_s=None)).shards):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        held: dict[LeaseId, Assign] = {}
        ack, version = 0, Version(-1)
        while True:
            stats = InstanceStats(version=version)
            report = Report(worker=self._rollout, ack=ack, held=[*held], stats=stats, wait_ms=500)
            answer = await scheduler.ask(report, Commands, timeout_s=None)
            for number, command in enumerate(answer.commands, start=answer.first):
                ack = max(ack, number)
                if isinstance(command, Pull):
                    version = command.version
                elif isinstance(command, Assign):
                    held[command.lease] = command
            leased = list(held.values())
            for start in range(0, len(leased), AT_ONCE):
                await self._push(shard, leased[start : start + AT_ONCE])
            held.clear()

    async def _push(self, shard: Client, leased: list[Assign]) -> None:
        items: list[PushItem] = []
        frames: list[memoryview] = []
        for assign in leased:
            specs, more = _payload(assign.version, assign.lease)
            frames += more
            group, lease = assign.group, assign.lease
            items.append(PushItem(group=group, lease=lease, worker=self._rollout, truncated=False, frames=specs))
        await shard.ask(PushGroups(items=items), Results, frames, timeout_s=None)

    async def _judge(self) -> None:
        rewards: Array = np.linspace(0, 1, GROUP_SIZE, dtype=np.float32)
        specs, frame = specs_and_frames({"reward": rewards})
        while True:
            take = GetStageWork(stage="reward", worker=self._stage, max_groups=AT_ONCE, wait_ms=5_000)
            work, _ = await self._of_stage.call(take, timeout_s=None)
            assert isinstance(work, StageWork)
            results = [
                StageResult(group=item.group, lease=item.lease, ticket=item.ticket, frames=specs) for item in work.items
            ]
            finish = PutStageResults(stage="reward", worker=self._stage, results=results)
            await self._of_stage.ask(finish, Results, frame * len(results), timeout_s=None)

    async def _train(self) -> None:
        scheduler, shard = self._of_trainer
        await scheduler.ask(Attach(worker=self._trainer, name="trainer", role="trainer"), AttachReply, timeout_s=None)
        join = Join(trainer=self._trainer, lineage=Lineage(0), version=Version(0))
        term = (await scheduler.ask(join, JoinReply, timeout_s=None)).trainer_term
        weights: dict[str, Array] = {"w": np.zeros(1_000, np.float32)}
        lineage = Lineage(0)
        await self._publisher.publish(weights, trainer_term=term, lineage=lineage, version=Version(0), batch=None)
        for step in range(self._steps):
            batch = await scheduler.ask(GetBatch(trainer_term=term, step=Step(step)), Batch, timeout_s=None)
            fetch = GetGroups(groups=[m.group for m in batch.members], shas=[m.sha for m in batch.members])
            groups, _ = await shard.call(fetch, timeout_s=None)
            assert isinstance(groups, Groups)
            version = Version(step + 1)
            weights["w"][:] = version
            await self._publisher.publish(
                weights, trainer_term=term, lineage=lineage, version=version, batch=batch.batch
            )
            if version % CHECKPOINT_EVERY == 0:
                kept = RegisterCheckpoint(trainer_term=term, lineage=lineage, version=version)
                await scheduler.ask(kept, RegisterCheckpointReply, timeout_s=None)
            self.trained += len(groups.groups) * GROUP_SIZE
            self._on_step(self.trained)


def _payload(version: Version, lease: LeaseId) -> tuple[list[TensorSpec], list[memoryview]]:
    random = np.random.default_rng(lease)
    total = GROUP_SIZE * TOKENS
    payload = GroupPayload(
        prompt_ids=np.arange(3, dtype=np.int32),
        lengths=np.full(GROUP_SIZE, TOKENS, np.int32),
        token_ids=random.integers(0, 1_000, total, dtype=np.int32),
        logprobs=-random.random(total, dtype=np.float32),
        loss_mask=np.ones(total, np.uint8),
        segments=np.asarray([(sample, 0, version, TOKENS) for sample in range(GROUP_SIZE)], np.int64),
        finish=np.zeros(GROUP_SIZE, np.uint8),
    )
    return specs_and_frames(payload.to_arrays())
