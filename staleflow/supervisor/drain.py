"""Ends every process within ten seconds: first those that work, then those that hold state, the scheduler last.

Each is asked (SIGTERM), given time, and swept. The next ones are asked only when nobody of the ones before is left, so
that whoever drains still has the servers it needs.
"""

import signal
import threading
import time
from collections.abc import Callable, Sequence

from staleflow.supervisor.children import Child
from staleflow.supervisor.roles import Kind

ORDER: tuple[tuple[frozenset[Kind], float], ...] = (
    (frozenset({Kind.WORKER, Kind.TRAINER}), 5.5),
    (frozenset({Kind.SERVER}), 2.0),
    (frozenset({Kind.SCHEDULER}), 2.0),
)
"""Who, and the most seconds they have."""
LOOK_S = 0.05


def drain(children: Sequence[Child], show: Callable[[], None], at_once: threading.Event) -> None:
    """Afterwards none of ``children`` runs, nor anything they started. ``at_once`` cuts the waiting short."""
    for child in children:
        child.restart_at = None
    for kinds, seconds in ORDER:
        asked = [child for child in children if child.role.kind in kinds]
        for child in asked:
            child.signal(signal.SIGTERM)
        deadline = time.monotonic() + seconds
        while any(child.alive for child in asked) and time.monotonic() < deadline and not at_once.is_set():
            show()
            at_once.wait(LOOK_S)
        for child in asked:
            child.sweep()
