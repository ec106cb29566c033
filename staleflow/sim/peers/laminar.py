"""Laminar: engines that never wait for each other, and whose last trajectories are packed together."""

import math

from staleflow.sim.peers.pool import Pool, Replica
from staleflow.sim.peers.rule import Rule

REPACK_S = 5.0


class Laminar(Rule):
    """An empty engine loads the newest weights and its share of a batch, which one version writes completely.

    Based on the paper (arXiv 2510.12633: relays in section 4, repack in 5.1, 5.2 and Algorithm 1, staleness in section
    6), read at second hand, and on a public re-implementation of Algorithm 1 (a fork of verl,
    verl/experimental/trajectory_async/repack.py). Every 5 s, and at each publish, among engines of one version: an
    engine whose KV cache shrinks and that has room for more samples moves all its samples to another such engine, the
    fullest that can hold them; then it is empty and starts again. An engine receives no more samples than lengthen its
    step (``k2 / k3``) or than it decodes at once. Batches are taken in order of finishing.

    Bound in versions: none, and none for the work ahead of the trainer either: where engines write more than the
    trainer takes, waiting groups age without limit. The paper looks at the age at the finish, and reports at most 4.
    """

    def __init__(self, pool: Pool) -> None:
        super().__init__(pool)
        self._share = math.ceil(pool.batch_size / len(pool.replicas))
        cost = pool.config.rollout.simulated
        self._roofline = cost.k2 / cost.k3 if cost.k3 else math.inf
        self._kv_before = dict.fromkeys(pool.replicas, 0)
        self._pulls = {replica: replica.version for replica in pool.replicas}
        """The version that each replica was last ordered to load."""
        self._timed = False

    def begin(self) -> None:
        for replica in self.pool.replicas:
            if not replica.groups:
                self._begin_on(replica)

    def _begin_on(self, replica: Replica) -> None:
        pool = self.pool
        if self._pulls[replica] != pool.version:
            self._pulls[replica] = pool.version
            pool.load(replica)
        if replica.version != pool.version:
            return
        for _ in range(self._share):
            pool.begin(replica)
        if pool.running and not self._timed:
            self._timed = True
            pool.timeline.after(REPACK_S, self._on_time)

    def published(self) -> None:
        if self.pool.version:
            self._repack()

    def _on_time(self) -> None:
        self._repack()
        self._timed = bool(self.pool.running)
        if self._timed:
            self.pool.timeline.after(REPACK_S, self._on_time)

    def _repack(self) -> None:
        pool = self.pool
        pool.changed = True
        kv_tokens = {replica: replica.engine.state().kv_tokens for replica in pool.replicas}
        for version in sorted({replica.version for replica in pool.replicas}):
            replicas = [replica for replica in pool.replicas if replica.version == version and replica.groups]
            self._pack([replica for replica in replicas if self._ramps_down(replica, kv_tokens[replica])], kv_tokens)
        self._kv_before = kv_tokens

    def _ramps_down(self, replica: Replica, kv_tokens: int) -> bool:
        return kv_tokens < min(_capacity(replica), self._kv_before[replica]) and replica.active < self._most(replica)

    def _most(self, replica: Replica) -> float:
        return min(replica.engine.slots, self._roofline)

    def _pack(self, candidates: list[Replica], kv_tokens: dict[Replica, int]) -> None:
        """Pack by best fit, the emptiest replica first; a replica that has received groups keeps its own."""
        kv_tokens = dict(kv_tokens)
        active = {replica: replica.active for replica in candidates}
        receivers: set[Replica] = set()
        for source in sorted(candidates, key=lambda replica: kv_tokens[replica]):
            if source in receivers:
                continue
            targets = [
                target
                for target in candidates
                if target is not source
                and active[target]
                and kv_tokens[target] + kv_tokens[source] <= _capacity(target)
                and active[target] + active[source] <= self._most(target)
            ]
            if not targets:
                continue
            target = max(targets, key=lambda replica: kv_tokens[replica])
            for group in tuple(source.groups):
                self.pool.move(group, target)
            kv_tokens[target] += kv_tokens[source]
            active[target] += active[source]
            active[source] = 0
            receivers.add(target)


def _capacity(replica: Replica) -> float:
    return replica.engine.kv_capacity or math.inf
