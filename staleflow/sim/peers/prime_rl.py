"""prime-rl: groups that become too old are cancelled while they run, and swept while they wait."""

from collections import deque
from collections.abc import Sequence
from typing import ClassVar

from staleflow.sim.engine import OnUpdate
from staleflow.sim.peers.pool import Group, Pool
from staleflow.sim.peers.rule import Rule

TARGET_LAG = 1
"""Batches that may be collected ahead of the newest version."""


class PrimeRl(Rule):
    """Batch k takes groups in order of arrival, none older than ``max_staleness``; older ones are discarded.

    Based on PrimeIntellect-ai/prime-rl: src/prime_rl/orchestrator/dispatcher.py (at each version the groups in flight
    that batch k could no longer take are cancelled whole), train_sink.py (waiting ones are swept), orchestrator.py (a
    batch is sent once the version before the one it follows is published; no group starts while the batch being
    collected is more than one ahead), concurrency.py (the cap on groups in flight). Engines load in place and keep
    their KV cache.

    Bound in versions: ``max_staleness`` (their ``max_off_policy_steps``), hard, for the version that a group started
    with. The price is tokens, of long groups first. Their cap on groups in flight fills the engines' memory; where that
    is far more than the trainer needs nearly all would be swept, so this model uses the kinder ``(max_staleness + 1) *
    batch_size``.
    """

    on_update: ClassVar[OnUpdate] = "keep"

    def __init__(self, pool: Pool) -> None:
        super().__init__(pool)
        self._collecting = 0
        """The step whose batch is being collected."""
        self._sent: deque[Sequence[Group]] = deque()

    def begin(self) -> None:
        pool = self.pool
        self._sweep()
        while self.ready() and self._lead() <= TARGET_LAG:
            batch = tuple(pool.finished)[: pool.batch_size]
            for group in batch:
                del pool.finished[group]
            self._sent.append(batch)
            self._collecting += 1
            self._sweep()
        cap = (pool.max_staleness + 1) * pool.batch_size
        while self._lead() <= TARGET_LAG and len(pool.running) < cap and pool.begin():
            pass

    def batch(self) -> Sequence[Group]:
        return self._sent.popleft() if self._sent else ()

    def published(self) -> None:
        pool = self.pool
        for group in [group for group in pool.running if self._too_old(group)]:
            pool.lose(group)
        super().published()

    def _sweep(self) -> None:
        for group in [group for group in self.pool.finished if self._too_old(group)]:
            self.pool.lose(group)

    def _lead(self) -> int:
        return self._collecting - self.pool.version

    def _too_old(self, group: Group) -> bool:
        return group.version < self._collecting - self.pool.max_staleness
