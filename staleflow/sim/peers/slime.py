"""slime, asynchronous: one generation job ahead of the trainer; weights change only between two jobs."""

import math
from collections.abc import Sequence

from staleflow.protocols.consistency.ids import Version
from staleflow.sim.peers.pool import Group, Pool
from staleflow.sim.peers.rule import Rule


class Slime(Rule):
    """The job of batch k + 1 starts when batch k goes to the trainer, and yields its first ``batch_size`` finished
    groups.

    Based on THUDM/slime: train_async.py (the order of jobs; weights wait for the running job, every
    ``update_weights_interval`` steps, here ``max_staleness``, at least 1), slime/rollout/sglang_rollout.py (a job
    starts ``over_sampling_batch_size`` groups, here ``batch_size`` times ``rollout.redundancy.groups``, again whenever
    fewer than a batch of them could still pass the filter; once it has its batch the rest is aborted and, without
    ``partial_rollout``, discarded).

    Bound in versions: the interval, by the shape of the loop: no group is in progress when weights change. The price is
    waiting for the slowest group of each job.
    """

    def __init__(self, pool: Pool) -> None:
        super().__init__(pool)
        self._interval = max(pool.max_staleness, 1)
        self._at_once = math.ceil(pool.batch_size * pool.config.rollout.redundancy.groups)
        self._jobs = 0
        """Jobs started; job k makes batch k."""
        self._weights = Version(-1)
        """The version that the engines were last ordered to load."""
        self._waiting = False
        """True if newer weights wait for the end of the running job."""

    def begin(self) -> None:
        pool = self.pool
        if self._jobs == pool.step and self._loaded():
            self._jobs += 1
        if self._jobs == pool.step + 1:
            self._continue_job()
        if self._waiting and self.ready():
            self._take_weights()

    def _continue_job(self) -> None:
        """Continue the job of the next step: start the groups that it lacks, discard surplus ones."""
        pool = self.pool
        while len(pool.running) + len(pool.finished) < pool.batch_size:
            if not all(pool.begin() for _ in range(self._at_once)):
                break
        if self.ready():
            for group in [*pool.running, *list(pool.finished)[pool.batch_size :]]:
                pool.lose(group)

    def batch(self) -> Sequence[Group]:
        return () if self._waiting or not self._loaded() else super().batch()

    def published(self) -> None:
        if self.pool.version == 0:
            self._take_weights()
        elif self.pool.version % self._interval == 0:
            self._waiting = True

    def _take_weights(self) -> None:
        self._waiting = False
        self._weights = self.pool.version
        super().published()

    def _loaded(self) -> bool:
        return all(replica.version == self._weights for replica in self.pool.replicas)
