"""NeMo-RL, asynchronous GRPO: every group is generated for one intended step."""

from collections import Counter
from collections.abc import Sequence
from typing import ClassVar

from staleflow.sim.engine import OnUpdate
from staleflow.sim.peers.pool import Group, Pool, Replica
from staleflow.sim.peers.rule import Rule


class NemoRl(Rule):
    """With version v, groups start for the steps up to ``v + max_staleness``, a whole batch for each step in turn; the
    trainer takes exactly the groups of its step, and waits for the last of them.

    Based on NVIDIA-NeMo/RL: nemo_rl/algorithms/async_utils.py (targets of a version, groups reserved for a target,
    ``max_trajectory_age_steps * num_prompts_per_step`` requests in flight, sampling by target alone, pause of new
    starts during a refit) and docs/guides/async-grpo.md (``in_flight_weight_updates`` without recomputed KV caches,
    which the guide recommends over its default of waiting for all requests). This model sets
    ``max_trajectory_age_steps`` to ``max_staleness``, at least 1: with 0 NeMo-RL would start nothing after its first
    batch. A filtered group is replaced for the same step.

    Bound in versions: ``max_staleness``, hard, for the version that a group started with. Nothing is lost. The price is
    waiting: a finished group never takes the place of a slow one in an earlier batch.
    """

    on_update: ClassVar[OnUpdate] = "keep"

    def __init__(self, pool: Pool) -> None:
        super().__init__(pool)
        self._ahead = max(pool.max_staleness, 1)
        self._max_running: float = self._ahead * pool.batch_size
        self._targets: dict[Group, int] = {}
        """The step of each group that is neither trained nor filtered."""
        self._started: Counter[int] = Counter()
        """Groups of each step, without filtered ones."""

    def begin(self) -> None:
        pool = self.pool
        replicas = self._replicas()
        while replicas and len(pool.running) < self._max_running and (target := self._next_target()) is not None:
            if not pool.begin(min(replicas, key=lambda replica: replica.active)):
                return
            self._targets[pool.started[-1]] = target
            self._started[target] += 1

    def _replicas(self) -> Sequence[Replica]:
        """Return the replicas that may start groups: all, except while weights are loaded."""
        return self.pool.replicas if self.pool.loaded() else ()

    def _next_target(self) -> int | None:
        """Return the first step that lacks groups and that the newest version may write for."""
        steps = range(self.pool.step, self.pool.version + self._ahead + 1)
        return next((step for step in steps if self._started[step] < self.pool.batch_size), None)

    def batch(self) -> Sequence[Group]:
        pool = self.pool
        intended = [group for group in pool.finished if self._targets[group] == pool.step]
        if len(intended) < pool.batch_size:
            return ()
        for group in intended:
            del self._targets[group]
        return intended

    def filtered(self, group: Group) -> None:
        self._started[self._targets.pop(group)] -= 1
