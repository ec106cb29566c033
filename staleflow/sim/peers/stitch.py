"""Stitch: requests that are pinned to exact versions."""

import math
from collections.abc import Sequence
from typing import ClassVar

from staleflow.sim.engine import OnUpdate
from staleflow.sim.peers.nemo_rl import NemoRl
from staleflow.sim.peers.pool import Pool, Replica


class Stitch(NemoRl):
    """A group is written by exactly one version: an engine loads newer weights once its own pinned requests have ended,
    and starts none meanwhile.

    Based on modal-projects/stitch: src/stitch/types.py and cookbook/common/hooks.py (a request demands the newest
    published version, ``exact`` with a lag of 0), src/stitch/sync.py (a commit closes the admission of its replica and
    waits for requests with exact versions; each replica for itself). A replica that is behind answers 409 and the
    request is repeated; here it waits at that engine. Stitch prescribes no trainer, and its check at a request does
    not bound the age at the step that trains it. This model therefore gives each step the groups that started for it,
    at most ``max_staleness`` steps ahead, as NeMo-RL does.

    Bound in versions: ``max_staleness``, at least 1, hard. Nothing is lost, and no group mixes versions. The price is
    engines that empty before each load.
    """

    on_update: ClassVar[OnUpdate] = "drain"

    def __init__(self, pool: Pool) -> None:
        super().__init__(pool)
        self._max_running = math.inf

    def _replicas(self) -> Sequence[Replica]:
        return [replica for replica in self.pool.replicas if replica.version == self.pool.version]
