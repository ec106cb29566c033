# pyright: basic, reportMissingImports=false
"""One rank of a trainer with fsdp. Its arguments are a model, a folder and two schedulers.

It trains the same steps in two runs: the first waits for each version, the second publishes while the next step trains.
There, no rank uploads its part of a version before it has trained the step that changes the weights.
"""

import asyncio
import dataclasses
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from staleflow.clients.trainer.backends.base import StepResult, Stopping
from staleflow.clients.trainer.backends.collectives import ManyRanks, open_ranks
from staleflow.clients.trainer.backends.tensors import ModelShards
from staleflow.clients.trainer.checkpoint import Checkpoints
from staleflow.clients.trainer.client import TrainerClient
from staleflow.clients.trainer.data.batch import TrainBatch
from staleflow.clients.trainer.loop import TrainingLoop
from staleflow.clients.trainer.ranks.follower import FollowerBatches
from staleflow.clients.trainer.ranks.leader import Leader, follow
from staleflow.clients.trainer.steps import ComputedStep
from staleflow.clients.trainer.torch_trainer import TorchTrainer
from staleflow.clients.weights.sharded import RankUpload, Spans
from staleflow.configs.ranks import place
from staleflow.configs.schema import Config
from staleflow.protocols.consistency.ids import Step
from staleflow.protocols.wire.messages import BeginPublishReply
from tests.clients.trainer.making import config, share

STEPS = 4
LIMIT_S = 200.0


def replaced(batch: TrainBatch) -> TrainBatch:
    """Return this rank's rows of a step that is the same in both runs, as the rows of this batch."""
    rows = share(batch.step, place().rank, place().world)
    return dataclasses.replace(rows, batch=batch.batch, lineage=batch.lineage, digest=batch.digest)


class Batches(FollowerBatches):
    def batch(self, step: Step) -> TrainBatch | None:
        batch = super().batch(step)
        return None if batch is None else replaced(batch)


class Trainer(TorchTrainer):
    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self.trained = [threading.Event() for _ in range(STEPS)]
        self.version = -1
        """The version that is being uploaded."""

    def sharded_weights(self) -> ModelShards:
        self.version += 1
        return super().sharded_weights()

    def train(self, batch: TrainBatch, step: Step, stopping: Stopping) -> StepResult:
        result = super().train(batch, step, stopping)
        self.trained[step].set()
        return result


def delay_uploads(client: TrainerClient, trainer: Trainer) -> None:
    """Let this rank upload a version only after the step that changes its weights; the last one has none."""
    publisher: Any = client._commits.publisher  # pyright: ignore[reportPrivateUsage]
    write_spans = publisher.write_spans

    async def delayed(to: BeginPublishReply, weights: Spans) -> RankUpload:
        if 0 < trainer.version < STEPS:
            assert await asyncio.to_thread(trainer.trained[trainer.version].wait, LIMIT_S)
        written: RankUpload = await write_spans(to, weights)
        return written

    publisher.write_spans = delayed


def train(chosen: Config, model: Path, folder: Path, scheduler: str, ranks: ManyRanks) -> None:
    """Train all steps of a run, with a checkpoint after every second one."""
    where, trainer = ranks.place, Trainer(chosen, model, ranks=ranks)
    name = "trainer" if where.leads else f"trainer-rank-{where.rank}"
    client = TrainerClient(scheduler, name=name, rank=where.rank, world=where.world)
    client.attach()
    if chosen.trainer.overlap_publish:
        delay_uploads(client, trainer)
    if where.leads:
        leader = Leader(trainer, ranks, lambda: client.current_term)
        client.same = leader.same

        def steps(client: TrainerClient, steps: int, stopping: Stopping) -> Iterator[ComputedStep]:
            for batch in map(replaced, client.batches(steps)):
                result = leader.train(batch, batch.step, stopping)
                yield ComputedStep(batch=batch, result=result, waited_s=0.0, trained_s=0.0)

        checkpoints = Checkpoints(folder, run=client.run, keep=2)
        stop = threading.Event()
        TrainingLoop(chosen, client=client, backend=leader, checkpoints=checkpoints, steps=steps, stop=stop).run()
        leader.close()
    else:
        batches = Batches(client, chosen.trainer.steps, streaming=False)
        follow(trainer, ranks, batches, lambda: False, client.write_spans)
    client.close()


def main() -> None:
    model, folder, *schedulers = sys.argv[1:]
    ranks: Any = open_ranks("fsdp")
    end, ranks.close = ranks.close, lambda: None  # the ranks outlive the first run
    for scheduler, overlaps in zip(schedulers, (False, True), strict=True):
        chosen = config(backend="fsdp", lr=1e-2, steps=STEPS, checkpoint_every=2, overlap_publish=overlaps)
        train(chosen, Path(model), Path(folder) / str(overlaps), scheduler, ranks)
    end()
