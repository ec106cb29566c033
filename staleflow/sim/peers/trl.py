"""TRL, asynchronous GRPO: age is looked at when the trainer takes a group."""

from collections.abc import Sequence
from typing import ClassVar

from staleflow.sim.engine import OnUpdate
from staleflow.sim.peers.pool import Group
from staleflow.sim.peers.rule import Rule

QUEUE = 1024
"""Samples that may wait for the trainer; nothing more begins then."""


class Trl(Rule):
    """``max_staleness`` batches are always under way; a group that is too old is thrown away when the trainer takes it.

    Read in huggingface/trl: trl/experimental/async_grpo/async_rollout_worker.py (as many under way as
    ``max_inflight_tasks``, whose default is ``max_staleness`` batches, here at least one; no other admission; a queue
    of 1,024 samples), async_grpo_trainer.py (order of completion; dropped at the dequeue; engines load each step in
    place and go on with their KV cache). They count completions and may train a group in part; here groups are counted.

    Bound in versions: ``max_staleness``, hard at the dequeue; paid in tokens, those of long groups first.
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
