"""Random trajectories for the benchmark of the trainer: equal for every way, by the number of the step."""

from dataclasses import dataclass
from typing import Final

import numpy as np

from staleflow.clients.trainer.data.batch import FetchedGroup, TrainBatch, assemble
from staleflow.protocols.consistency.ids import BatchId, GroupId, Lineage, Step, Version
from staleflow.protocols.wire.messages import Batch
from staleflow.protocols.wire.trajectory import GroupPayload


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of one step's batch."""

    groups: int
    samples: int
    """In each group."""
    prompt: tuple[int, int]
    """Smallest and largest number of tokens, drawn for each group."""
    completion: tuple[int, int]
    """The same for each sample."""
    micro_tokens: int


SHAPES: Final = {
    "quickstart": Shape(groups=32, samples=8, prompt=(6, 8), completion=(3, 6), micro_tokens=16_384),
    "smollm2": Shape(groups=8, samples=8, prompt=(19, 24), completion=(3, 5), micro_tokens=4_096),
    "long prompts": Shape(groups=4, samples=8, prompt=(200, 256), completion=(5, 30), micro_tokens=4_096),
    "long answers": Shape(groups=4, samples=4, prompt=(20, 40), completion=(30, 250), micro_tokens=2_048),
}


def batch(shape: Shape, step: int, vocabulary: int) -> TrainBatch:
    """Return the batch of a step. Rewards differ within each group."""
    groups = groups_of(shape, step, vocabulary)
    header = Batch(
        batch=BatchId(step + 1),
        lineage=Lineage(0),
        step=Step(step),
        attempt=1,
        members=[],
        digest=f"{step:064x}",
        mask_below=Version(-1),
    )
    return assemble(header, groups)


def groups_of(shape: Shape, step: int, vocabulary: int) -> list[FetchedGroup]:
    """Return the groups of the batch of a step."""
    draw = np.random.default_rng(step)
    return [_group(shape, group, vocabulary, draw) for group in range(shape.groups)]


def _group(shape: Shape, group: int, vocabulary: int, draw: np.random.Generator) -> FetchedGroup:
    lengths = draw.integers(shape.completion[0], shape.completion[1] + 1, shape.samples)
    total = int(lengths.sum())
    payload = GroupPayload(
        prompt_ids=draw.integers(0, vocabulary, draw.integers(shape.prompt[0], shape.prompt[1] + 1)).astype(np.int32),
        lengths=lengths.astype(np.int32),
        token_ids=draw.integers(0, vocabulary, total).astype(np.int32),
        logprobs=-draw.uniform(2.0, 4.0, total).astype(np.float32),
        loss_mask=np.ones(total, np.uint8),
        segments=np.array([(row, 0, 0, length) for row, length in enumerate(lengths)], np.int64),
        finish=np.zeros(shape.samples, np.uint8),
        stages={"stage/reward/reward": draw.uniform(0, 1, shape.samples).astype(np.float32)},
    )
    return FetchedGroup(group=GroupId(group), row={}, payload=payload)
