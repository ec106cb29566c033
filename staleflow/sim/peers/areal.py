"""AReaL: a bound on work that is not yet trained."""

from collections.abc import Sequence

from staleflow.sim.peers.pool import Group
from staleflow.sim.peers.rule import Rule


class Areal(Rule):
    """A group may begin while ``(max_staleness + v + 1) * batch_size`` exceeds all that were accepted or are running.

    Read in inclusionAI/AReaL: areal/infra/staleness_manager.py (the capacity; a rejected rollout leaves both counters),
    workflow_executor.py (a batch is the earliest created of the results on hand), trainer/rl_trainer.py (after each
    step: submission pauses, all engines take the weights, it goes on), remote_inf_engine.py (requests in flight are
    aborted and sent again with the tokens they have: read in anew). Nothing is thrown away for its age.

    Bound in versions: none. At most ``(max_staleness + 1) * batch_size`` groups are begun and not trained, so the mean
    age is about ``max_staleness``; but while short groups feed the trainer a long one may grow as old as it is long.
    Left out: ``max_concurrent_rollouts``, taken as high enough not to matter.
    """

    def begin(self) -> None:
        pool = self.pool
        if not pool.loaded():
            return
        while self.capacity() > 0 and pool.begin():
            pass

    def capacity(self) -> int:
        """Groups that may begin now."""
        pool = self.pool
        accepted = pool.step * pool.batch_size + len(pool.finished)
        return (pool.max_staleness + pool.version + 1) * pool.batch_size - accepted - len(pool.running)

    def batch(self) -> Sequence[Group]:
        pool = self.pool
        return sorted(pool.finished, key=lambda group: group.number)[: pool.batch_size] if self.ready() else ()
