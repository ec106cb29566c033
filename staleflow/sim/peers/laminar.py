"""Laminar: engines that never wait for each other, and whose last trajectories are put together."""

import math

from staleflow.sim.peers.pool import Pool, Replica
from staleflow.sim.peers.rule import Rule

REPACK_S = 5.0


class Laminar(Rule):
    """An engine that is empty takes the newest weights and its share of a batch; all of it is written by one version.

    From the paper (arXiv 2510.12633: relays in section 4, repack in 5.1, 5.2 and Algorithm 1, staleness in section 6),
    read at second hand, and a public re-implementation of Algorithm 1 (a fork of verl,
    verl/experimental/trajectory_async/repack.py). Every 5 s, and when a version is out, among engines of one version:
    one whose KV cache shrinks and that has room for more samples gives all it has to another such, the fullest that can
    hold it; so it is empty, and begins anew. An engine is given no more samples than make its step longer (``k2 / k3``)
    or than it decodes at once. Batches are taken in order of finishing.

    Bound in versions: none, and none for the work ahead of the trainer either: where engines write more than it takes,
    what waits for it grows older without end. The paper looks at the age at the finish, and reports at most 4.
    """

    def __init__(self, pool: Pool) -> None:
        super().__init__(pool)
        self._share = math.ceil(pool.batch_size / len(pool.replicas))
        cost = pool.config.rollout.simulated
        self._roofline = cost.k2 / cost.k3 if cost.k3 else math.inf
        self._kv_before = dict.fromkeys(pool.replicas, 0)
        self._pulls = {replica: replica.version for replica in pool.replicas}
        """What each was told to load last."""
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
        held = {replica: replica.engine.seen().kv_tokens for replica in pool.replicas}
        for version in sorted({replica.version for replica in pool.replicas}):
            same = [replica for replica in pool.replicas if replica.version == version and replica.groups]
            self._put_together([replica for replica in same if self._ramps_down(replica, held[replica])], held)
        self._kv_before = held

    def _ramps_down(self, replica: Replica, held: int) -> bool:
        return held < min(_capacity(replica), self._kv_before[replica]) and replica.active < self._most(replica)

    def _most(self, replica: Replica) -> float:
        return min(replica.engine.slots, self._roofline)

    def _put_together(self, candidates: list[Replica], held: dict[Replica, int]) -> None:
        """Best fit, the emptiest first; one that was given something stays."""
        held = dict(held)
        active = {replica: replica.active for replica in candidates}
        given: set[Replica] = set()
        for source in sorted(candidates, key=lambda replica: held[replica]):
            if source in given:
                continue
            takers = [
                taker
                for taker in candidates
                if taker is not source
                and active[taker]
                and held[taker] + held[source] <= _capacity(taker)
                and active[taker] + active[source] <= self._most(taker)
            ]
            if not takers:
                continue
            taker = max(takers, key=lambda replica: held[replica])
            for group in tuple(source.groups):
                self.pool.move(group, taker)
            held[taker] += held[source]
            active[taker] += active[source]
            active[source] = 0
            given.add(taker)


def _capacity(replica: Replica) -> float:
    return replica.engine.kv_capacity or math.inf
