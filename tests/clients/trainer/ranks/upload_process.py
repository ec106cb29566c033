"""One rank of a trainer that publishes rows as version 0, without a model. Its argument is the scheduler.

With the further argument ``kill``, the last rank is killed after its first span.
"""

import os
import signal
import sys
from collections.abc import Iterator
from typing import Any, cast

from staleflow.clients.trainer.backends.collectives import ManyRanks
from staleflow.clients.trainer.client import TrainerClient
from staleflow.clients.trainer.ranks.leader import Leader, RankBackend, follow
from staleflow.clients.weights.sharded import Span
from staleflow.configs.ranks import place
from staleflow.protocols.consistency.ids import Lineage, Version
from tests.clients.trainer.ranks.rows import Rows
from tests.clients.trainer.ranks.test_leader import Fed, Recorded
from tests.clients.trainer.ranks.test_uploads import made


class Killed(Rows):
    """Rows of a rank that is killed before its second span."""

    def spans(self) -> Iterator[Span]:
        for number, span in enumerate(super().spans()):
            if number == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            yield span


class Backend(Recorded):
    """A rank's backend, with its rows of the weights."""

    def __init__(self, rows: Rows) -> None:
        super().__init__(together=True)
        self.sharded_weights = lambda: rows  # type: ignore[method-assign]


def main() -> None:
    """Publish on rank 0, follow it on the others."""
    scheduler, kill = sys.argv[1], "kill" in sys.argv
    where = place()
    ranks: Any = ManyRanks(where)
    dies = kill and where.rank == where.world - 1
    rows = (Killed if dies else Rows)(made(0), where.rank, where.world)
    backend = cast("RankBackend", Backend(rows))
    name = "trainer" if where.leads else f"trainer-rank-{where.rank}"
    client = TrainerClient(scheduler, name=name, rank=where.rank, world=where.world)
    if where.leads:
        leader = Leader(backend, ranks, lambda: client.current_term)
        client.join(Lineage(0), Version(0))
        client.publish_initial(leader.weights())
        leader.close()
    else:
        client.attach()
        follow(backend, ranks, Fed(), lambda: False, client.write_spans)
    client.close()
