"""Registry of attached processes. A name belongs to one process: a newer process replaces the older one.

The ``Attach`` of each process is stored, so that after a restart of the scheduler its first message identifies it and
it need not attach again. A silent process counts as lost until its next message.
"""

from collections import Counter, deque
from collections.abc import Callable
from heapq import nsmallest

import msgspec

from staleflow.net.permissions import ATTACHES_AS, Role
from staleflow.net.security import OBSERVER_ROLES
from staleflow.process.clock import Clock
from staleflow.protocols.consistency.ids import WorkerId
from staleflow.protocols.wire.messages import Attach
from staleflow.protocols.wire.stages import REWARD
from staleflow.store.base import Read, Write

SERVERS = ("trajectories", "parameters")
"""Roles with a fixed number of processes in a run."""
ROLES = ("rollout", "stage", "trainer", "trajectories", "parameters", "relay", "prompts", "monitor", "admin")
MAX_SILENT = 1_024
"""Maximum number of silent processes; those that became silent first are discarded first."""
MAX_SILENT_PER_KEY = 256
"""Maximum number of silent processes of one key."""
SILENT_TIMEOUT_MS = 24 * 3_600_000
"""Time after which a silent process is discarded."""
RECONNECT_TIMEOUT_MS = 600_000
"""After a restart of the scheduler, time after which a stored process without a message counts as lost."""
FIRST_MESSAGE_TIMEOUT_MS = 3_000
"""After a restart of the scheduler, time that a process has to send a message before status shows it as silent."""
CRASH_LOOP_WINDOW_MS = 300_000
"""Window in which restarts count as a crash loop. A trainer that loads a large model restarts once a minute."""
MAX_STARTS = 64
"""Maximum number of stored start times of one trainer, and of trainer names."""
RETURN_TIMEOUT_MS = 300_000
"""Time in which a lost process may return: restarted, with its model loaded."""
MAX_ENDED = 4_096
"""Maximum number of stored ids of ended processes: a duplicate ``Attach`` arrives before this many are replaced."""


class Process:
    """One attached process."""

    __slots__ = ("alive", "attach", "contacted", "generated", "key", "seen_ms", "silent_since_ms")

    def __init__(self, attach: Attach, now_ms: int, *, alive: bool) -> None:
        self.attach = attach
        self.alive = alive
        self.contacted = alive
        """A message has arrived since this scheduler process started."""
        self.seen_ms = now_ms
        """Time of its last message."""
        self.silent_since_ms = now_ms
        """Time at which it became silent, if it is silent."""
        self.key = ""
        """Key of its connection; empty without keys, and after a scheduler restart until its first message."""
        self.generated: int | None = 0 if alive else None
        """Generated tokens as of its last report; None after a scheduler restart until its first report."""

    @property
    def worker(self) -> WorkerId:
        return self.attach.worker

    @property
    def name(self) -> str:
        return self.attach.name

    @property
    def role(self) -> str:
        return self.attach.role


class Registry:
    """All processes by name and by id."""

    def __init__(self, shards: int, clock: Clock) -> None:
        self._clock = clock
        self._endpoints = [""] * shards
        self._parameters = ""
        self._names: dict[str, Process] = {}
        self._workers: dict[WorkerId, Process] = {}
        self._silent: dict[str, dict[WorkerId, Process]] = {}
        """Silent processes by key, in the order in which they became silent."""
        self._reconnect_until_ms: float = 0
        """Until this time, a stored process may be alive although no message has arrived."""
        self._starts: dict[str, deque[int]] = {}
        """Start times of trainer processes, by name."""
        self._end_reasons: dict[WorkerId, str] = {}
        """Reasons why replaced or detached processes may not attach again, for the newest ``MAX_ENDED`` of them."""

    def load(self, txn: Read) -> None:
        """Restore the attached processes; none counts as alive before its first message."""
        self._reconnect_until_ms = self._clock.now_ms() + RECONNECT_TIMEOUT_MS
        for _, raw in txn.items("workers"):
            try:
                attach = msgspec.msgpack.decode(raw, type=Attach)
            except msgspec.ValidationError:  # stored by another protocol version; that process cannot connect any more
                continue
            self._add(Process(attach, self._clock.now_ms(), alive=False))

    def attach(self, attach: Attach, key: str = "") -> Process | None:
        """Add a process with the key of its connection; return the process that it replaces, or None."""
        older = self._names.get(attach.name)
        if older is not None:
            self._workers.pop(older.worker, None)
            self._remove_silent(older)
        process = Process(attach, self._clock.now_ms(), alive=True)
        process.key = key
        if older is not None and older.worker == attach.worker:  # a repeated Attach; the engine keeps its counter
            process.generated = older.generated
        elif attach.role == "trainer" and (attach.name in self._starts or len(self._starts) < MAX_STARTS):
            self._starts.setdefault(attach.name, deque(maxlen=MAX_STARTS)).append(process.seen_ms)
        self._add(process)
        if older is None or older.worker == attach.worker:
            return None
        self._end(older, f"a newer process has taken the name of {older.worker}")
        return older

    def _add(self, process: Process) -> None:
        attach = process.attach
        self._names[attach.name] = self._workers[attach.worker] = process
        if attach.role == "trajectories":
            self._endpoints[attach.shard] = attach.endpoint
        elif attach.role == "parameters":
            self._parameters = attach.endpoint

    def remove(self, worker: WorkerId) -> Process | None:
        """Remove and return a process that has detached."""
        process = self._workers.pop(worker, None)
        if process is not None:
            del self._names[process.name]
            self._remove_silent(process)
            self._end(process, f"{worker} has detached")
        return process

    def mark_silent(self, process: Process) -> None:
        """Mark a process as silent."""
        process.alive = False
        process.silent_since_ms = self._clock.now_ms()
        self._silent.setdefault(process.key, {})[process.worker] = process

    def mark_alive(self, process: Process, key: str) -> None:
        """Mark a silent process as alive after a message under ``key``."""
        self._remove_silent(process)
        process.key = key or process.key
        process.alive = process.contacted = True

    def _remove_silent(self, process: Process) -> None:
        gone = self._silent.get(process.key, {})
        gone.pop(process.worker, None)
        if not gone:
            self._silent.pop(process.key, None)

    def num_alive(self, key: str, limit: int) -> int:
        """Return the number of live processes with ``key``; 0 if they cannot reach ``limit``."""
        if len(self._names) < limit:  # spares the scan at every attach of a small run
            return 0
        return sum(process.alive and process.key == key for process in self._names.values())

    def discard_silent(self, needed: Callable[[Process], bool]) -> list[Process]:
        """Discard processes that are silent for too long, and the longest silent ones beyond the maximum number.

        Servers are kept, because a restarted scheduler must know their endpoints. So are processes that are ``needed``.
        """
        now = self._clock.now_ms()
        if self._reconnect_until_ms and now >= self._reconnect_until_ms:
            self._reconnect_until_ms = 0
            for process in self._names.values():
                if not process.contacted:
                    self.mark_silent(process)
        forgotten = list[Process]()
        for gone in self._silent.values():
            excess = len(gone) - MAX_SILENT_PER_KEY
            for process in gone.values():
                if excess <= 0 and now - process.silent_since_ms < SILENT_TIMEOUT_MS:
                    break
                if process.role not in SERVERS and not needed(process):
                    forgotten.append(process)
                    excess -= 1
        self._discard(forgotten)
        if (excess := sum(map(len, self._silent.values())) - MAX_SILENT) > 0:
            every = [process for gone in self._silent.values() for process in gone.values()]
            free = [process for process in every if process.role not in SERVERS and not needed(process)]
            self._discard(more := nsmallest(excess, free, key=lambda process: process.silent_since_ms))
            forgotten += more
        return forgotten

    def _discard(self, processes: list[Process]) -> None:
        for process in processes:
            self._remove_silent(process)
            del self._workers[process.worker], self._names[process.name]

    def _end(self, process: Process, why: str) -> None:
        """Refuse later messages of an ended process: a duplicate of its ``Attach`` would replace its successor.

        Processes with a read-only role may attach again.
        """
        if process.role in OBSERVER_ROLES:
            return
        self._end_reasons[process.worker] = why
        if len(self._end_reasons) > MAX_ENDED:
            del self._end_reasons[next(iter(self._end_reasons))]

    def get(self, worker: str) -> Process | None:
        """Return the process with that id, alive or silent."""
        return self._workers.get(WorkerId(worker))

    def name_of(self, worker: WorkerId) -> str:
        """Return the name of a process; its id if the process is unknown."""
        process = self._workers.get(worker)
        return worker if process is None else process.name

    def named(self, name: str) -> Process | None:
        """Return the process with that name, alive or silent."""
        return self._names.get(name)

    def end_reason(self, worker: str) -> str | None:
        """Return why a process may not attach again, or None. Final, because ids are never reused."""
        return self._end_reasons.get(WorkerId(worker))

    def name_conflict(self, worker: str, role: Role, key: str) -> str | None:
        """Return why a connection with ``key`` of ``role`` may not send messages as ``worker``, or None.

        After a restart of the scheduler, the role of a worker is known from the store, but its key only after its first
        message.
        """
        process = self._workers.get(WorkerId(worker))
        if process is None:
            return None
        if process.role not in ATTACHES_AS[role]:
            return f"{worker} is a process of role {process.role}; a key of role {role} may not act for it"
        return None if process.key in ("", key) else f"{worker} has another key"

    def processes(self) -> list[Process]:
        """Return all processes, in the order in which their names first attached."""
        return list(self._names.values())

    def server(self, role: str, shard: int = 0) -> Process | None:
        """Return the server of that role and shard, alive or silent; None if it never attached or has left."""
        return next((p for p in self._names.values() if (p.role, p.attach.shard) == (role, shard)), None)

    def silent_s(self, process: Process) -> float:
        """Return how many seconds a process has been silent; 0 while it is alive."""
        silent_ms = self._clock.now_ms() - process.seen_ms
        return (
            0.0
            if process.alive or (silent_ms < FIRST_MESSAGE_TIMEOUT_MS and not process.contacted)
            else max(silent_ms, 1) / 1000
        )

    def restarts(self, name: str) -> int:
        """Return how often a trainer of that name was restarted in the last ``CRASH_LOOP_WINDOW_MS``."""
        starts = self._starts.get(name, ())
        since_ms = self._clock.now_ms() - CRASH_LOOP_WINDOW_MS
        return sum(start_ms >= since_ms for number, start_ms in enumerate(starts) if number)

    def may_return(self, role: str) -> bool:
        """Return whether a process of that role was lost within ``RETURN_TIMEOUT_MS``: it may still return."""
        now_ms = self._clock.now_ms()
        return any(
            process.role == role and not process.alive and now_ms - process.seen_ms < RETURN_TIMEOUT_MS
            for process in self._names.values()
        )

    def stage_workers(self) -> Counter[str]:
        """Return the number of live workers of each stage."""
        alive = (process for process in self._names.values() if process.alive and process.role == "stage")
        return Counter(process.attach.stage or REWARD for process in alive)

    def endpoints(self) -> list[str]:
        """Return the endpoints of the trajectory servers, in shard order; "" for a shard that has never attached."""
        return self._endpoints

    def parameters(self) -> str:
        """Return the endpoint of the parameter server; "" before it has attached."""
        return self._parameters


def save(txn: Write, attach: Attach) -> None:
    """Store the ``Attach`` of a process under its name."""
    txn.put("workers", attach.name.encode(), msgspec.msgpack.encode(attach))


def forget(txn: Write, name: str) -> None:
    """Delete the stored process of that name."""
    txn.delete("workers", name.encode())
