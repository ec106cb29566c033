"""One coordination cycle: a snapshot in, orders out. Pure, so that it runs unchanged in the simulator."""

import msgspec

from staleflow.protocols.coordination.admission import Admission, admitted
from staleflow.protocols.coordination.migration import Migration, move
from staleflow.protocols.coordination.routing import Routing, route
from staleflow.protocols.coordination.sync import Sync, load
from staleflow.protocols.coordination.view import Order, Snapshot


class Strategies(msgspec.Struct, frozen=True, kw_only=True):
    """The chosen strategies and their settings: the keys of ``[coordination]`` that ``decide`` uses."""

    routing: Routing
    min_gain: float
    sync: Sync
    sync_threshold: int
    migration: Migration
    migration_gap: float
    admission: Admission


def decide(snapshot: Snapshot, strategies: Strategies) -> list[Order]:
    """Return the orders of one cycle, in order: loads of weights, starts of groups, moves of groups.

    An instance that is behind starts nothing. It loads the newest weights, or is ordered to once few enough of its
    samples are left.
    """
    loads = load(snapshot, strategies.sync, strategies.sync_threshold)
    starts = route(admitted(snapshot, strategies.admission), strategies.routing, strategies.min_gain)
    given = {start.worker for start in starts}
    return [*loads, *starts, *move(snapshot, strategies.migration, strategies.migration_gap, given)]
