"""Ends every process: first those that work, then those that hold state, the scheduler last. Within ten seconds, unless
a trainer saves.

Each is asked (SIGTERM), given time, and swept. The next ones are asked only when nobody of the ones before is left, so
that whoever drains still has the servers it needs.
"""

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Sequence

from staleflow.supervisor.children import Child
from staleflow.supervisor.roles import Kind, Works

ORDER = (frozenset({Kind.WORKER, Kind.TRAINER}), frozenset({Kind.SERVER}), frozenset({Kind.SCHEDULER}))
LIMITS_S = {Kind.WORKER: 5.5, Kind.TRAINER: 5.5, Kind.SERVER: 2.0, Kind.SCHEDULER: 2.0}
"""The most that each has."""
SAVES_S = 60.0
"""Instead, for a trainer that has joined the run: it ends its step and writes a checkpoint, of many GB perhaps."""
MACHINE_S = 75.0
"""For who looks after such a trainer on another machine."""
POLL_INTERVAL_S = 0.05


def drain(
    children: Sequence[Child], show: Callable[[], None], say: Callable[[str], object], at_once: threading.Event
) -> None:
    """Afterwards none of ``children`` runs, nor anything they started. ``at_once`` cuts the waiting short. ``say``: who
    is waited for longer than others are. What ``show`` and ``say`` raise changes nothing."""
    for child in children:
        child.restart_at = None
    for kinds in ORDER:
        asked = [child for child in children if child.role.kind in kinds]
        for child in asked:
            child.signal(signal.SIGTERM)
        began, told = time.monotonic(), False
        while (alive := [child for child in asked if child.alive]) and not at_once.is_set():
            lasts_s = time.monotonic() - began
            for child in alive:
                if lasts_s >= _limit_s(child):
                    child.sweep()
            saving = [child.name for child in alive if child.alive and lasts_s >= LIMITS_S[child.role.kind]]
            if saving and not told:
                told = True
                with contextlib.suppress(Exception):  # boundary: who looks on keeps nobody alive
                    say(f"{', '.join(saving)} may still be writing a checkpoint: a second Ctrl-C does not wait for it")
            with contextlib.suppress(Exception):
                show()
            at_once.wait(POLL_INTERVAL_S)
        for child in asked:
            child.sweep()


def _limit_s(child: Child) -> float:
    if child.role.kind is not Kind.TRAINER:
        return LIMITS_S[child.role.kind]
    if child.role.works is not Works.ATTACHED:
        return MACHINE_S
    return SAVES_S if child.attached_at is not None else LIMITS_S[Kind.TRAINER]
