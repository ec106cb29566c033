"""Which processes are attached. A name belongs to one live process: a newer one replaces the older.

What a process said when it attached is stored, so that after a restart of the scheduler it is known again at its first
word and needs not attach anew. Who is silent is gone until it is heard again.
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
"""Roles of which a run has a fixed number of processes."""
ROLES = ("rollout", "stage", "trainer", "trajectories", "parameters", "relay", "monitor", "admin")
MAX_GONE = 1_024
"""Silent processes that are known at once; the one that fell silent first is forgotten first."""
MAX_GONE_PER_KEY = 256
"""The same of one key."""
FORGET_AFTER_MS = 24 * 3_600_000
"""A process that is silent for this long is forgotten."""
UNHEARD_MS = 600_000
"""Processes that a scheduler knows from its store count as silent when it has not heard them for this long."""
SILENT_MS = 3_000
"""After a restart of the scheduler a process has this long to be heard before it counts as silent."""
RESTARTS_MS = 300_000
"""Restarts of a process within this are a crash loop. A trainer that loads a large model restarts once a minute."""
MAX_STARTS = 64
"""Starts of one process that are remembered."""
RETURN_MS = 300_000
"""A lost process may be back within this: started again, with its model loaded."""
MAX_OVER = 4_096
"""So many processes that are over are known; an echo comes sooner than so many are replaced."""


class Process:
    """One attached process."""

    __slots__ = ("alive", "attach", "generated", "gone_ms", "heard", "key", "seen_ms")

    def __init__(self, attach: Attach, now_ms: int, *, alive: bool) -> None:
        self.attach = attach
        self.alive = alive
        self.heard = alive
        """By this process of the scheduler; silent since, or not."""
        self.seen_ms = now_ms
        self.gone_ms = now_ms
        """When it fell silent, if it is."""
        self.key = ""
        """That it came with; empty without keys, and after a restart until it is heard."""
        self.generated: int | None = 0 if alive else None
        """Tokens that it has generated, by its last report; None after a restart until it reports."""

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
        self._gone: dict[str, dict[WorkerId, Process]] = {}
        """Silent processes by key, in order of their silence."""
        self._unheard_until_ms: float = 0
        """Until then a process from the store may be alive and just not heard yet."""
        self._starts: dict[str, deque[int]] = {}
        """When each trainer attached, by name, as a new process."""
        self._over: dict[WorkerId, str] = {}
        """Why those may not come again who were replaced or said goodbye, the newest of them."""

    def load(self, txn: Read) -> None:
        """Know again who was attached; nobody counts as alive before it is heard."""
        self._unheard_until_ms = self._clock.now_ms() + UNHEARD_MS
        for _, raw in txn.items("workers"):
            try:
                attach = msgspec.msgpack.decode(raw, type=Attach)
            except msgspec.ValidationError:  # of another protocol, in which that process cannot be heard again
                continue
            self._know(Process(attach, self._clock.now_ms(), alive=False))

    def attach(self, attach: Attach, key: str = "") -> Process | None:
        """Take a process in, with the key of its connection; the one that it replaces, if there is one."""
        older = self._names.get(attach.name)
        if older is not None:
            self._workers.pop(older.worker, None)
            self._is_back(older)
        process = Process(attach, self._clock.now_ms(), alive=True)
        process.key = key
        if older is not None and older.worker == attach.worker:
            process.generated = older.generated
        elif attach.role == "trainer" and (attach.name in self._starts or len(self._starts) < MAX_STARTS):
            self._starts.setdefault(attach.name, deque(maxlen=MAX_STARTS)).append(process.seen_ms)
        self._know(process)
        if older is None or older.worker == attach.worker:
            return None
        self._end(older, f"a newer process has taken the name of {older.worker}")
        return older

    def _know(self, process: Process) -> None:
        attach = process.attach
        self._names[attach.name] = self._workers[attach.worker] = process
        if attach.role == "trajectories":
            self._endpoints[attach.shard] = attach.endpoint
        elif attach.role == "parameters":
            self._parameters = attach.endpoint

    def remove(self, worker: WorkerId) -> Process | None:
        """A process that said goodbye."""
        process = self._workers.pop(worker, None)
        if process is not None:
            del self._names[process.name]
            self._is_back(process)
            self._end(process, f"{worker} has said goodbye")
        return process

    def lost(self, process: Process) -> None:
        """Note that a process is silent."""
        process.alive = False
        process.gone_ms = self._clock.now_ms()
        self._gone.setdefault(process.key, {})[process.worker] = process

    def found(self, process: Process, key: str) -> None:
        """Note that a silent process is heard again, with that key."""
        self._is_back(process)
        process.key = key or process.key
        process.alive = process.heard = True

    def _is_back(self, process: Process) -> None:
        gone = self._gone.get(process.key, {})
        gone.pop(process.worker, None)
        if not gone:
            self._gone.pop(process.key, None)

    def num_alive(self, key: str, limit: int) -> int:
        """Return how many live processes came with ``key``; 0 where they cannot be as many as ``limit``."""
        if len(self._names) < limit:
            return 0
        return sum(process.alive and process.key == key for process in self._names.values())

    def forget_gone(self, needed: Callable[[Process], bool]) -> list[Process]:
        """Forget the processes that are silent for too long, and those that fell silent first where there are too many.

        A server is kept: a restart of the scheduler must know where it is. So is a process that is ``needed``.
        """
        now = self._clock.now_ms()
        if self._unheard_until_ms and now >= self._unheard_until_ms:
            self._unheard_until_ms = 0
            for process in self._names.values():
                if not process.heard:
                    self.lost(process)
        forgotten = list[Process]()
        for gone in self._gone.values():
            excess = len(gone) - MAX_GONE_PER_KEY
            for process in gone.values():
                if excess <= 0 and now - process.gone_ms < FORGET_AFTER_MS:
                    break
                if process.role not in SERVERS and not needed(process):
                    forgotten.append(process)
                    excess -= 1
        self._forget(forgotten)
        if (excess := sum(map(len, self._gone.values())) - MAX_GONE) > 0:
            every = [process for gone in self._gone.values() for process in gone.values()]
            free = [process for process in every if process.role not in SERVERS and not needed(process)]
            self._forget(more := nsmallest(excess, free, key=lambda process: process.gone_ms))
            forgotten += more
        return forgotten

    def _forget(self, processes: list[Process]) -> None:
        for process in processes:
            self._is_back(process)
            del self._workers[process.worker], self._names[process.name]

    def _end(self, process: Process, why: str) -> None:
        """An echo of its ``Attach`` would throw its successor out. Who only looked may come again."""
        if process.role in OBSERVER_ROLES:
            return
        self._over[process.worker] = why
        if len(self._over) > MAX_OVER:
            del self._over[next(iter(self._over))]

    def get(self, worker: str) -> Process | None:
        """The process of that id, alive or silent."""
        return self._workers.get(WorkerId(worker))

    def name_of(self, worker: WorkerId) -> str:
        """The name of a process; its id where the process is unknown."""
        process = self._workers.get(worker)
        return worker if process is None else process.name

    def named(self, name: str) -> Process | None:
        """The process of that name, alive or silent."""
        return self._names.get(name)

    def over(self, worker: str) -> str | None:
        """Why a process may not come again; None if it may. Its id is not used again, so that this is for good."""
        return self._over.get(WorkerId(worker))

    def name_conflict(self, worker: str, role: Role, key: str) -> str | None:
        """Why the holder of a key of that role may not speak as that worker; None if it may. After a restart a key is
        not known before it is heard, a role is."""
        process = self._workers.get(WorkerId(worker))
        if process is None:
            return None
        if process.role not in ATTACHES_AS[role]:
            return f"{worker} is a process of role {process.role}, for which a key of role {role} may not speak"
        return None if process.key in ("", key) else f"{worker} has another key"

    def processes(self) -> list[Process]:
        """All, in order of attachment."""
        return list(self._names.values())

    def server(self, role: str, shard: int = 0) -> Process | None:
        """The server of that role and shard, alive or silent; None where it never attached or has left."""
        return next((p for p in self._names.values() if (p.role, p.attach.shard) == (role, shard)), None)

    def silent_s(self, process: Process) -> float:
        """For how long a process has been silent; 0 while it is alive."""
        silent_ms = self._clock.now_ms() - process.seen_ms
        return 0.0 if process.alive or (silent_ms < SILENT_MS and not process.heard) else max(silent_ms, 1) / 1000

    def restarts(self, name: str) -> int:
        """How often a trainer of that name was started again in the last ``RESTARTS_MS``."""
        starts = self._starts.get(name, ())
        since_ms = self._clock.now_ms() - RESTARTS_MS
        return sum(start_ms >= since_ms for number, start_ms in enumerate(starts) if number)

    def awaits(self, role: str) -> bool:
        """Whether a process of that role fell silent so shortly ago that it, or its successor, may still come back."""
        now_ms = self._clock.now_ms()
        return any(
            process.role == role and not process.alive and now_ms - process.seen_ms < RETURN_MS
            for process in self._names.values()
        )

    def stage_workers(self) -> Counter[str]:
        """By stage: its workers that are alive."""
        alive = (process for process in self._names.values() if process.alive and process.role == "stage")
        return Counter(process.attach.stage or REWARD for process in alive)

    def endpoints(self) -> list[str]:
        """Where the trajectory servers are, in order of shard; empty for one that has never attached."""
        return self._endpoints

    def parameters(self) -> str:
        """Where the parameter server is; empty before it has attached."""
        return self._parameters


def save(txn: Write, attach: Attach) -> None:
    """Store what a process said when it attached, under its name."""
    txn.put("workers", attach.name.encode(), msgspec.msgpack.encode(attach))


def forget(txn: Write, name: str) -> None:
    """Forget the process of that name."""
    txn.delete("workers", name.encode())
