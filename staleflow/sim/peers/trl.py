"""TRL, asynchronous GRPO: age is checked when the trainer takes a group."""

from collections.abc import Sequence
from typing import ClassVar

from staleflow.sim.engine import OnUpdate
from staleflow.sim.peers.pool import Group
from staleflow.sim.peers.rule import Rule

QUEUE = 1024
"""Samples that may wait for the trainer; no group starts beyond that."""


class Trl(Rule):
    """``max_staleness`` batches are always in progress; a group that is too old is discarded when the trainer takes it.

    Based on huggingface/trl: trl/experimental/async_grpo/async_rollout_worker.py (``max_inflight_tasks`` in progress,
    by default ``max_staleness`` batches, here at least one; no other admission; a queue of 1,024 samples),
    async_grpo_trainer.py (order of completion; dropped at the dequeue; engines load each step in place and keep their
    KV cache). TRL counts completions and may train a group in part; this model counts groups.

    Bound in versions: ``max_staleness``, hard at the dequeue. The price is tokens, of long groups first.
    """

    on_update: ClassVar[OnUpdate] = "keep"

    def begin(self) -> None:
        pool = self.pool
        under_way = max(pool.max_staleness, 1) * pool.batch_size
        queue = QUEUE // pool.config.rollout.group_size
        while len(pool.running) < under_way and len(pool.finished) < queue and pool.begin():
            pass

    def batch(self) -> Sequence[Group]:
        pool = self.pool
        fresh: list[Group] = []
        for group in tuple(pool.finished):
            if group.version < pool.step - pool.max_staleness:
                pool.lose(group)
                continue
            fresh.append(group)
            if len(fresh) == pool.batch_size:
                return fresh
        return ()
