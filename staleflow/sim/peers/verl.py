"""verl, fully asynchronous: a window of new work per parameter synchronisation."""

from staleflow.sim.peers.pool import Pool
from staleflow.sim.peers.rule import Rule

PER_ENGINE = 16
"""Groups in progress at once, per engine."""


class Verl(Rule):
    """Between two synchronisations ``(1 + max_staleness) * batch_size`` groups may start, less those not yet trained.

    Based on volcengine/verl: verl/experimental/fully_async_policy/fully_async_rollouter.py (``staleness_samples``
    counts started groups, stops at the window, and is set to the groups in progress or queued at each synchronisation;
    at most 16 in progress per engine), fully_async_trainer.py and message_queue.py (batches in order of completion; a
    full queue drops its oldest, which this window never lets happen), param_sync.py (with ``partial_rollout`` groups in
    progress are stopped with their tokens and continue first, after their KV cache is recomputed). This model sets
    ``staleness_threshold`` to ``max_staleness`` and ``trigger_parameter_sync_step`` to 1: one synchronisation per train
    step, as in the other models.

    Bound in versions: none. The window is a ratio of counts; an old group counts, but is never refused.
    """

    def __init__(self, pool: Pool) -> None:
        super().__init__(pool)
        self._counted = 0

    def begin(self) -> None:
        pool = self.pool
        window = (1 + pool.max_staleness) * pool.batch_size
        max_running = min(PER_ENGINE * len(pool.replicas), window)
        if not pool.loaded():
            return
        while self._counted < window and len(pool.running) < max_running and pool.begin():
            self._counted += 1

    def published(self) -> None:
        self._counted = len(self.pool.running) + len(self.pool.finished)
        super().published()
