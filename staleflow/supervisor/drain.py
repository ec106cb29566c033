"""Stop all processes of a run in order: workers and trainers, then servers, then the scheduler.

Each group receives SIGTERM, has time to exit, and is then killed with its process group. The next group starts only
after every process of the one before has exited, because a draining worker still needs its servers. All of it takes at
most ten seconds, unless a trainer writes a checkpoint.
"""

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Sequence

from staleflow.supervisor.children import Child
from staleflow.supervisor.roles import Kind, WorkingSince

DRAIN_ORDER = (frozenset({Kind.WORKER, Kind.TRAINER}), frozenset({Kind.SERVER}), frozenset({Kind.SCHEDULER}))
TIMEOUTS_S = {Kind.WORKER: 5.5, Kind.TRAINER: 5.5, Kind.SERVER: 2.0, Kind.SCHEDULER: 2.0}
"""Seconds that a process has between SIGTERM and SIGKILL."""
CHECKPOINT_TIMEOUT_S = 60.0
"""Timeout of a trainer that has attached: it finishes its step and writes a checkpoint, which may have many GB."""
MACHINE_TIMEOUT_S = 75.0
"""Timeout of a launcher that supervises such a trainer on another machine."""
POLL_INTERVAL_S = 0.05


def drain(
    children: Sequence[Child], show: Callable[[], None], notify: Callable[[str], object], at_once: threading.Event
) -> None:
    """Stop ``children`` and every process that they started.

    Setting ``at_once`` ends the wait. ``notify`` receives the names of processes that take longer than usual.
    Exceptions of ``show`` and ``notify`` are ignored.
    """
    for child in children:
        child.restart_at = None
    for kinds in DRAIN_ORDER:
        targets = [child for child in children if child.role.kind in kinds]
        for child in targets:
            child.signal(signal.SIGTERM)
        started_s, announced = time.monotonic(), False
        while (alive := [child for child in targets if child.alive]) and not at_once.is_set():
            elapsed_s = time.monotonic() - started_s
            for child in alive:
                if elapsed_s >= _timeout_s(child):
                    child.sweep()
            saving = [child.name for child in alive if child.alive and elapsed_s >= TIMEOUTS_S[child.role.kind]]
            if saving and not announced:
                announced = True
                with contextlib.suppress(Exception):  # boundary: a broken view must not keep processes alive
                    notify(
                        f"{', '.join(saving)} may still be writing a checkpoint; press Ctrl-C again to stop without it"
                    )
            with contextlib.suppress(Exception):
                show()
            at_once.wait(POLL_INTERVAL_S)
        for child in targets:
            child.sweep()


def _timeout_s(child: Child) -> float:
    if child.role.kind is not Kind.TRAINER:
        return TIMEOUTS_S[child.role.kind]
    if child.role.works is not WorkingSince.ATTACHED:
        return MACHINE_TIMEOUT_S
    return CHECKPOINT_TIMEOUT_S if child.attached_at is not None else TIMEOUTS_S[Kind.TRAINER]
