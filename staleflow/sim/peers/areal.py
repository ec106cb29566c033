"""AReaL: a bound on work that is not yet trained."""

from collections.abc import Sequence

from staleflow.sim.peers.pool import Group
from staleflow.sim.peers.rule import Rule


class Areal(Rule):
    """A group may start while ``(max_staleness + v + 1) * batch_size`` exceeds the accepted and running groups.

    Based on inclusionAI/AReaL: areal/infra/staleness_manager.py (the capacity; a rejected rollout leaves both
    counters), workflow_executor.py (a batch is the earliest created of the available results), trainer/rl_trainer.py
    (after each step: submission pauses, all engines load the weights, submission continues), remote_inf_engine.py
    (requests in flight are aborted and sent again with their tokens, which are prefilled again). Nothing is discarded
    for its age.

    Bound in versions: none. At most ``(max_staleness + 1) * batch_size`` groups are started and not trained, so the
    mean age is about ``max_staleness``; but while short groups feed the trainer a long one may age without limit. Left
    out: ``max_concurrent_rollouts``, assumed high enough not to matter.
    """

    def begin(self) -> None:
        pool = self.pool
        if not pool.loaded():
            return
        while self.capacity() > 0 and pool.begin():
            pass

    def capacity(self) -> int:
        """Return the number of groups that may start now."""
        pool = self.pool
        accepted = pool.step * pool.batch_size + len(pool.finished)
        return (pool.max_staleness + pool.version + 1) * pool.batch_size - accepted - len(pool.running)

    def batch(self) -> Sequence[Group]:
        pool = self.pool
        return sorted(pool.finished, key=lambda group: group.number)[: pool.batch_size] if self.ready() else ()
