"""Configurations and batches for the tests of the trainer."""

from typing import Any

import msgspec
import numpy as np

from staleflow.clients.trainer.data.batch import FetchedGroup, TrainBatch, assemble
from staleflow.clients.trainer.data.prefetch import shares
from staleflow.configs.schema import Config
from staleflow.protocols.consistency.ids import BatchId, GroupId, Lineage, Step, Version
from staleflow.protocols.wire.messages import Batch
from staleflow.protocols.wire.trajectory import GroupPayload


def config(**trainer: Any) -> Config:
    """A configuration for the torch backend."""
    table: dict[str, Any] = {
        "prompts": {"source": "somewhere:prompts"},
        "reward": {"run": "somewhere:reward"},
        "rollout": {"max_new_tokens": 12},
        "trainer": {"lr": 1e-3, "grad_clip": 10.0, **trainer},
    }
    return msgspec.convert(table, Config)


def payload(seed: int, lengths: list[int], *, version: int = 0, prompt: int = 3) -> GroupPayload:
    """A group of random tokens; one version writes each sample."""
    random, total = np.random.default_rng(seed), sum(lengths)
    return GroupPayload(
        prompt_ids=random.integers(0, 18, prompt).astype(np.int32),
        lengths=np.array(lengths, np.int32),
        token_ids=random.integers(0, 18, total).astype(np.int32),
        logprobs=-random.uniform(2.0, 4.0, total).astype(np.float32),
        loss_mask=np.ones(total, np.uint8),
        segments=np.array([(i, 0, version, n) for i, n in enumerate(lengths) if n], np.int64).reshape(-1, 4),
        finish=np.zeros(len(lengths), np.uint8),
        stages={"stage/reward/reward": random.uniform(0, 1, len(lengths)).astype(np.float32)},
    )


def header(step: int, *, mask_below: int = -1) -> Batch:
    return Batch(
        batch=BatchId(step + 1),
        lineage=Lineage(0),
        step=Step(step),
        attempt=1,
        members=[],
        digest=f"{step:064x}",
        mask_below=Version(mask_below),
    )


def members(
    step: int, *, groups: int = 3, lengths: tuple[int, ...] = (5, 9, 2, 7), longest: int = 1
) -> list[FetchedGroup]:
    """The groups of a batch, the last ``longest`` times as long; equal steps give equal groups."""
    each = [[n * (longest if group == groups - 1 else 1) for n in lengths] for group in range(groups)]
    return [FetchedGroup(group=GroupId(g), row={}, payload=payload(100 * step + g, each[g])) for g in range(groups)]


def share(step: int, rank: int, world: int, *, groups: int = 3, longest: int = 1) -> TrainBatch:
    """One rank's share of ``batch(step)``."""
    every = members(step, groups=groups, longest=longest)
    mine = shares([item.payload.num_tokens for item in every], world)[rank]
    return assemble(header(step), [every[place] for place in mine])


def piece_shares(step: int, rank: int, world: int, size: int, *, groups: int) -> list[TrainBatch]:
    """One rank's shares when the batch arrives in pieces of ``size`` groups."""
    every, found = members(step, groups=groups), list[TrainBatch]()
    for start in range(0, groups, size):
        part = every[start : start + size]
        mine = shares([item.payload.num_tokens for item in part], world)[rank]
        found.append(assemble(header(step), [part[place] for place in mine]))
    return found


def batch(step: int, *, groups: int = 3, lengths: tuple[int, ...] = (5, 9, 2, 7), longest: int = 1) -> TrainBatch:
    """A whole batch of random groups; equal steps give equal batches."""
    return assemble(header(step), members(step, groups=groups, lengths=lengths, longest=longest))
