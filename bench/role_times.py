"""Processor time of the roles of a real run, from the kernel: what each used, and how long it waited for a core.

Waiting is what other work on the machine, and the run's own processes on a shared core, add to a measured cost. It is
the ``run_delay`` of /proc/PID/task/TID/schedstat: time in which a thread could run and did not.
"""

import contextlib
import os
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import psutil

INTERVAL_S = 0.2
SUBCOMMANDS = ("serve", "attach")
"""``staleflow serve ROLE`` and ``staleflow attach ROLE`` are the processes of a run."""


class Used(NamedTuple):
    """Seconds of all threads of a role."""

    cpu_s: float
    waited_s: float

    @property
    def slowdown(self) -> float:
        """Time that the role took for a second of processor time."""
        return 1.0 + self.waited_s / self.cpu_s if self.cpu_s else 1.0


@dataclass(frozen=True, slots=True)
class RoleTimes:
    """Samples of the run's processes over time."""

    samples: Sequence[tuple[float, Mapping[str, Used]]]
    """(seconds of the monotonic clock, roles), in order."""

    def between(self, began_s: float, ended_s: float) -> dict[str, Used]:
        """Return the times of each role from the sample before ``began_s`` to the one before ``ended_s``."""
        first = max((one for one in self.samples if one[0] <= began_s), default=self.samples[0])
        last = max(one for one in self.samples if one[0] <= ended_s)
        return {
            role: Used(used.cpu_s - first[1][role].cpu_s, used.waited_s - first[1][role].waited_s)
            for role, used in last[1].items()
            if role in first[1]
        }

    def seconds(self, began_s: float, ended_s: float) -> float:
        """Return the time between the two samples of ``between``."""
        times_s = [at_s for at_s, _ in self.samples]
        return max(at for at in times_s if at <= ended_s) - max(
            (at for at in times_s if at <= began_s), default=times_s[0]
        )


@contextlib.contextmanager
def sampled(pid: int, cores: Mapping[str, int]) -> Generator[RoleTimes]:
    """Sample the processes of the run that ``pid`` supervises until the block ends.

    ``cores``: roles that get a core of their own, and its number; their threads are pinned to it.
    """
    samples: list[tuple[float, Mapping[str, Used]]] = []
    stop = threading.Event()

    def work() -> None:
        while not stop.wait(INTERVAL_S):
            samples.append((time.monotonic(), _roles(pid, cores)))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield RoleTimes(samples)
    finally:
        stop.set()
        thread.join()


def _roles(pid: int, cores: Mapping[str, int]) -> dict[str, Used]:
    totals: dict[str, Used] = {}
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in psutil.Process(pid).children():
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError, FileNotFoundError):
                role = role_of(process.cmdline())
                if role:
                    for one in (process, *process.children(recursive=True)):
                        used, before = _used(one.pid, cores.get(role)), totals.get(role, Used(0.0, 0.0))
                        totals[role] = Used(before.cpu_s + used.cpu_s, before.waited_s + used.waited_s)
    return totals


def role_of(command: Sequence[str]) -> str:
    """Return the role that a command line starts; "" for another process."""
    for place, word in enumerate(command[:-1]):
        if word in SUBCOMMANDS:
            return command[place + 1]
    return ""


def _used(pid: int, core: int | None) -> Used:
    cpu_ns = waited_ns = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            ran, waited, _ = (task / "schedstat").read_text().split()
            cpu_ns, waited_ns = cpu_ns + int(ran), waited_ns + int(waited)
            if core is not None and os.sched_getaffinity(int(task.name)) != {core}:
                os.sched_setaffinity(int(task.name), {core})
    return Used(cpu_ns / 1e9, waited_ns / 1e9)
