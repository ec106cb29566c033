"""An instance that reports arbitrary leases and never reads its orders costs a bounded number of orders."""

from pathlib import Path

from staleflow.protocols.consistency.ids import WorkerId
from staleflow.servers.scheduler.coordination.instances import MAX_ABORTS
from tests.servers.scheduler.asked import Asked


def test_orders_that_nobody_takes_do_not_pile_up(tmp_path: Path) -> None:
    run = Asked(tmp_path)
    run.cast("a")
    instance = run.service._instances.get(WorkerId("a"))  # pyright: ignore[reportPrivateUsage]
    assert instance is not None
    for first in range(10**6, 10**6 + 10**5, 10**4):
        run.report("a", held=range(first, first + 10**4))
    assert len(instance.commands.pending) <= MAX_ABORTS + 16
    assert len(instance.aborting) <= MAX_ABORTS
    run.stop()
