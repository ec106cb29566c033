"""verl, fully asynchronous: a window of new work a parameter synchronisation."""

from staleflow.sim.peers.pool import Pool
from staleflow.sim.peers.rule import Rule

PER_ENGINE = 16
"""Groups under way at once, an engine."""


class Verl(Rule):
    """Between two synchronisations ``(1 + max_staleness) * batch_size`` groups may begin, less those not yet trained.

    Read in volcengine/verl: verl/experimental/fully_async_policy/fully_async_rollouter.py (``staleness_samples`` counts
    what begins, stops at the window, and is set to what is under way or queued at each synchronisation; at most 16
    under way an engine), fully_async_trainer.py and message_queue.py (batches in order of completion; a full queue
    drops its oldest, which this window never lets happen), param_sync.py (with ``partial_rollout`` groups under way are
    stopped with their tokens and go on first, their KV cache built anew). Here ``staleness_threshold`` is
    ``max_staleness``, and ``trigger_parameter_sync_step`` 1: one synchronisation a train step, as the others have.

    Bound in versions: none. The window is a ratio of counts; an old group counts, but is never refused.
    """

    def __init__(self, pool: Pool) -> None:
        super().__init__(pool)
        self._counted = 0

    def begin(self) -> None:
        pool = self.pool
        window = (1 + pool.max_staleness) * pool.batch_size
        most = min(PER_ENGINE * len(pool.replicas), window)
        if not pool.loaded():
            return
        while self._counted < window and len(pool.running) < most and pool.begin():
            self._counted += 1

    def published(self) -> None:
        self._counted = len(self.pool.running) + len(self.pool.finished)
        super().published()
