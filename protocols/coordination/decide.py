"""One cycle: snapshot in, orders out. Pure, so it runs unchanged against a simulator."""

from staleflow.protocols.coordination.routing import ROUTINGS, Routing
from staleflow.protocols.coordination.sync import greedy
from staleflow.protocols.coordination.view import Order, Snapshot


def decide(snapshot: Snapshot, routing: Routing) -> list[Order]:
    """What to do now, in order: first who loads weights, then who starts groups.

    An instance that is behind starts nothing: it is loading, or is told to within a few cycles.
    """
    return [*greedy(snapshot), *ROUTINGS[routing](snapshot)]
