"""Which processes are attached. A name belongs to one live process: a newer one replaces the older.

What a process said when it attached is stored, so that after a restart of the scheduler it is known again at its first
word and needs not attach anew. Who is silent is gone until it is heard again.
"""

from collections import Counter

import msgspec

from staleflow.protocols.consistency.ids import WorkerId
from staleflow.protocols.wire.messages import Attach
from staleflow.protocols.wire.stages import REWARD
from staleflow.runtime.clock import Clock
from staleflow.runtime.store import Read, Write

ROLES = ("rollout", "stage", "trainer", "trajectories", "parameters", "relay", "monitor", "admin")


class Process:
    """One attached process."""

    __slots__ = ("alive", "attach", "heard", "key", "seen_ms")

    def __init__(self, attach: Attach, now_ms: int, *, alive: bool) -> None:
        self.attach = attach
        self.alive = alive
        self.heard = alive
        """By this process of the scheduler; silent since, or not."""
        self.seen_ms = now_ms
        self.key = ""
        """That it came with; empty without keys, and after a restart until it is heard."""

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
        self._replaced: dict[WorkerId, str] = {}

    def load(self, txn: Read) -> None:
        """Know again who was attached; nobody counts as alive before it is heard."""
        for _, raw in txn.items("workers"):
            process = Process(msgspec.msgpack.decode(raw, type=Attach), self._clock.now_ms(), alive=False)
            self._know(process)

    def attach(self, attach: Attach) -> Process | None:
        """Take a process in; the one that it replaces, if there is one."""
        older = self._names.get(attach.name)
        if older is not None:
            self._workers.pop(older.worker, None)
        self._know(Process(attach, self._clock.now_ms(), alive=True))
        self._replaced.pop(attach.worker, None)
        if older is None or older.worker == attach.worker:
            return None
        self._replaced[older.worker] = attach.name
        while len(self._replaced) > 4096:
            self._replaced.pop(next(iter(self._replaced)))
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
        return process

    def get(self, worker: str) -> Process | None:
        """The process of that id, alive or silent."""
        return self._workers.get(WorkerId(worker))

    def named(self, name: str) -> Process | None:
        """The process of that name, alive or silent."""
        return self._names.get(name)

    def came_with(self, worker: WorkerId, key: str) -> None:
        """The key of a process, as its connection says."""
        self._workers[worker].key = key

    def was_replaced(self, worker: str) -> bool:
        """Whether a newer process took the name of this one."""
        return worker in self._replaced

    def processes(self) -> list[Process]:
        """All, in order of attachment."""
        return list(self._names.values())

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
