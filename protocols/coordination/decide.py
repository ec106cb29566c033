"""One cycle: snapshot in, orders out. Pure, so it runs unchanged in the simulator."""

import msgspec

from staleflow.protocols.coordination.admission import Admission, admitted
from staleflow.protocols.coordination.migration import Migration, move
from staleflow.protocols.coordination.routing import Routing, route
from staleflow.protocols.coordination.sync import Sync, load
from staleflow.protocols.coordination.view import Order, Snapshot


class Strategies(msgspec.Struct, frozen=True, kw_only=True):
    """The chosen strategies and their settings: ``[coordination]`` of the configuration, as far as ``decide`` goes."""

    routing: Routing
    min_gain: float
    sync: Sync
    sync_threshold: int
    migration: Migration
    migration_gap: float
    admission: Admission


def decide(snapshot: Snapshot, strategies: Strategies) -> list[Order]:
    """What to do now, in order: who loads weights, who starts groups, which groups go on elsewhere.

    An instance that is behind starts nothing: it loads, or is told to once it has little enough left to write.
    """
    loads = load(snapshot, strategies.sync, strategies.sync_threshold)
    starts = route(admitted(snapshot, strategies.admission), strategies.routing, strategies.min_gain)
    given = {start.worker for start in starts}
    return [*loads, *starts, *move(snapshot, strategies.migration, strategies.migration_gap, given)]
