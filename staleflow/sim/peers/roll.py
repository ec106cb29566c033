"""ROLL, its rule for agents: groups of the last steps; older ones are discarded."""

from collections.abc import Sequence

from staleflow.sim.peers.pool import Group
from staleflow.sim.peers.rule import Rule


class RollAgentic(Rule):
    """At each step groups that started more than ``max_staleness`` steps ago are discarded, and others start instead.

    ROLL's *agentic* rule, based on alibaba/ROLL: roll/distributed/scheduler/rollout_scheduler.py (each step adds a
    batch of new groups, the first ``1 + max_staleness`` batches, their ``async_generation_ratio``; first come, first
    trained; groups past the window are removed at the step, and their later results are ignored). Weights reach all
    engines at the step; running groups continue with them, after their KV cache is recomputed. Finished groups
    of the oldest step go first, as in the model of it in psrl-project/DryRun-RL, dryrun/simulator/policy (roll). Its
    other pipeline, for single turns (generate_scheduler.py), waits for its stragglers instead, like a strict bound.

    Bound in versions: ``max_staleness``, hard. The price is tokens, of long groups first.
    """

    def begin(self) -> None:
        pool = self.pool
        if not pool.loaded():
            return
        budget = (pool.max_staleness + 1 + pool.version) * pool.batch_size
        while pool.step * pool.batch_size + len(pool.finished) + len(pool.running) < budget and pool.begin():
            pass

    def batch(self) -> Sequence[Group]:
        pool = self.pool
        return sorted(pool.finished, key=lambda group: group.version)[: pool.batch_size] if self.ready() else ()

    def published(self) -> None:
        pool = self.pool
        for group in [*pool.running, *pool.finished]:
            if group.version < pool.version - pool.max_staleness:
                pool.lose(group)
        super().published()
