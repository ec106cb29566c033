"""A load for the scheduler: attached workers, a shard, a parameter server and a trainer, real sockets, no payload.

Every worker keeps a report open and keeps the groups that it is assigned. The shard registers pushes and occupies in
batches. The trainer consumes as soon as a batch is sealed. Generation takes no time, so only the scheduler is measured.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

import psutil
import zmq

from staleflow.net.limits import TransportLimits
from staleflow.net.zmq_stream import DrainedSocket
from staleflow.protocols.consistency.ids import LeaseId, Lineage, Segment, Step, TrainerTerm, Version, WorkerId
from staleflow.protocols.wire.codec import decode_reply, encode_request
from staleflow.protocols.wire.messages import (
    Abort,
    Assign,
    Attach,
    Batch,
    Commands,
    GetBatch,
    InstanceStats,
    Join,
    JoinReply,
    Op,
    Operations,
    Ping,
    Pull,
    Pulled,
    Refusal,
    RegisterCheckpoint,
    RegisterOccupy,
    RegisterPush,
    RegisterVersion,
    RegisterVersionReply,
    Reply,
    Report,
    Request,
    Results,
)

OPS_A_MESSAGE = 32
UNDER_WAY = 1
"""Number of messages of pushes that wait for their reply; the same number of occupies."""
CHECKPOINT_EVERY = 4
SHA = "0123456789abcdef" * 4
LINEAGE = Lineage(0)
LIMITS = TransportLimits()

Then = Callable[[Reply, float], None]


class Peer:
    """One minimal DEALER: requests out, each reply to its own callback with the seconds it took."""

    def __init__(self, address: str, name: str) -> None:
        self.name = name
        self.worker = WorkerId(f"{name}.bench")
        self._then: dict[int, tuple[Then, float]] = {}
        self._id = 0
        self.socket = DrainedSocket(zmq.DEALER, num_heads=1, limits=LIMITS, on_message=self._receive)
        self.socket.zmq.set(zmq.ROUTING_ID, f"{self.worker}/0".encode())
        self.socket.zmq.connect(address)
        self.socket.start()

    def ask(self, body: Request, then: Then) -> None:
        self._id += 1
        self._then[self._id] = (then, time.perf_counter())
        if not self.socket.send((encode_request(self._id, body),)):
            raise RuntimeError(f"{self.worker}: the scheduler does not take messages")

    def _receive(self, head: list[bytes], frames: list[memoryview], oversize: bool) -> None:
        id, reply = decode_reply(head[0])
        then, started = self._then.pop(id)
        then(reply, time.perf_counter() - started)


def ignore(_: Reply, __: float) -> None:
    """Ignore this reply."""


@dataclass
class Counts:
    """Operations that were acknowledged during the measurement."""

    reserves: int = 0
    pushes: int = 0
    occupies: int = 0
    consumes: int = 0
    reports: int = 0
    seconds: float = 0.0
    cpu_s: float = 0.0
    """CPU seconds of the server process."""
    commits: int = 0
    """Transactions of the scheduler's store."""
    latencies_s: list[float] = field(default_factory=list[float])

    @property
    def operations(self) -> int:
        return self.reserves + self.pushes + self.occupies + self.consumes

    @property
    def cpu_us(self) -> float:
        """CPU time of the server per operation."""
        return 1e6 * self.cpu_s / max(self.operations, 1)

    @property
    def per_second(self) -> float:
        return self.operations / self.seconds

    def latency_ms(self, share: float) -> float:
        """Latency of a message of operations, from before its encoding to after the decoding of its reply."""
        ordered = sorted(self.latencies_s)
        return 1000 * ordered[min(int(len(ordered) * share), len(ordered) - 1)] if ordered else 0.0


class Worker:
    """An instance that finishes every assigned group at once."""

    def __init__(self, address: str, number: int, assigned: "Callable[[Worker, Assign], None]") -> None:
        self.peer = Peer(address, f"rollout-{number}")
        self.held: dict[LeaseId, None] = {}
        self.reports = 0
        self._assigned = assigned
        self._ack = 0
        self._version = Version(-1)

    def report(self) -> None:
        """Report the state and wait for commands."""
        self.reports += 1
        stats = InstanceStats(lineage=LINEAGE, version=self._version, running=len(self.held))
        worker = self.peer.worker
        self.peer.ask(Report(worker=worker, ack=self._ack, held=list(self.held), stats=stats), self._on_commands)

    def _on_commands(self, reply: Reply, _: float) -> None:
        if not isinstance(reply, Commands):
            raise RuntimeError(f"{self.peer.worker}: {reply}")
        for number, command in enumerate(reply.commands, reply.first):
            if number <= self._ack:
                continue
            self._ack = number
            if isinstance(command, Assign):
                self.held[command.lease] = None
                self._assigned(self, command)
            elif isinstance(command, Pull):
                self._version = command.version
                pulled = Pulled(worker=self.peer.worker, lineage=LINEAGE, version=command.version, sha=SHA, ok=True)
                self.peer.ask(pulled, ignore)
            elif isinstance(command, Abort):
                raise RuntimeError(f"{self.peer.worker}: nothing was to be aborted")
        self.report()


class Shard:
    """Registers finished groups in batches, a few batches under way at a time."""

    def __init__(self, address: str, counts: Callable[[], Counts]) -> None:
        self.peer = Peer(address, "trajectories-0")
        self._counts = counts
        self._pushes: deque[tuple[Assign, Worker]] = deque()
        self._occupies: deque[Assign] = deque()
        self._pushing = 0
        self._occupying = 0

    def assigned(self, worker: Worker, assign: Assign) -> None:
        self._counts().reserves += 1
        self._pushes.append((assign, worker))
        self.send()

    def send(self) -> None:
        """Keep ``UNDER_WAY`` messages of each kind under way while groups remain to be registered."""
        while self._pushes and self._pushing < UNDER_WAY:
            pushed = [self._pushes.popleft() for _ in range(min(len(self._pushes), OPS_A_MESSAGE))]
            self._pushing += 1
            ops: list[Op] = [_push(assign, worker.peer.worker) for assign, worker in pushed]
            self.peer.ask(Operations(ops=ops), partial(self._on_pushed, pushed))
        while self._occupies and self._occupying < UNDER_WAY:
            some = [self._occupies.popleft() for _ in range(min(len(self._occupies), OPS_A_MESSAGE))]
            self._occupying += 1
            self.peer.ask(Operations(ops=[_occupy(assign) for assign in some]), self._on_occupied)

    def _on_pushed(self, pushed: Iterable[tuple[Assign, Worker]], reply: Reply, seconds: float) -> None:
        self._pushing -= 1
        self._counts().pushes += _all_done(reply)
        self._counts().latencies_s.append(seconds)
        for assign, worker in pushed:
            worker.held.pop(assign.lease, None)
            self._occupies.append(assign)
        self.send()

    def _on_occupied(self, reply: Reply, seconds: float) -> None:
        self._occupying -= 1
        self._counts().occupies += _all_done(reply)
        self._counts().latencies_s.append(seconds)
        self.send()


class Trainer:
    """Joins, publishes version 0, and consumes every batch as soon as it is sealed."""

    def __init__(self, address: str, counts: Callable[[], Counts]) -> None:
        self.peer = Peer(address, "trainer")
        self._counts = counts
        self._term = TrainerTerm(0)
        self._version = Version(0)

    def start(self) -> None:
        self.peer.ask(Join(trainer=self.peer.worker, lineage=LINEAGE, version=Version(0)), self._on_joined)

    def _on_joined(self, reply: Reply, _: float) -> None:
        if not isinstance(reply, JoinReply):
            raise RuntimeError(f"the trainer may not join: {reply}")
        self._term = reply.trainer_term
        self._register(None)

    def _register(self, batch: Batch | None) -> None:
        register = RegisterVersion(
            trainer_term=self._term,
            lineage=LINEAGE,
            version=self._version,
            batch=None if batch is None else batch.batch,
            sha=f"{self._version:064d}",
            nbytes=1 << 30,
        )
        self.peer.ask(register, self._on_registered)

    def _on_registered(self, reply: Reply, seconds: float) -> None:
        if not isinstance(reply, RegisterVersionReply):
            raise RuntimeError(f"version {self._version} is not taken: {reply}")
        if self._version:
            self._counts().consumes += 1
            self._counts().latencies_s.append(seconds)
        if self._version and self._version % CHECKPOINT_EVERY == 0:
            kept = RegisterCheckpoint(trainer_term=self._term, lineage=LINEAGE, version=self._version)
            self.peer.ask(kept, ignore)
        self._next()

    def _next(self) -> None:
        self.peer.ask(GetBatch(trainer_term=self._term, step=Step(self._version)), self._on_batch)

    def _on_batch(self, reply: Reply, _: float) -> None:
        if isinstance(reply, Batch):
            self._version = Version(self._version + 1)
            self._register(reply)
        elif isinstance(reply, Refusal):  # busy: it still waits
            self._next()


class Load:
    """All peers of one run."""

    def __init__(self, address: str, *, workers: int, capacity: int) -> None:
        self._counts = Counts()
        self._capacity = capacity
        self._shard = Shard(address, self.counts)
        self._parameters = Peer(address, "parameters")
        self._trainer = Trainer(address, self.counts)
        self._workers = [Worker(address, number, self._shard.assigned) for number in range(workers)]

    def counts(self) -> Counts:
        return self._counts

    async def run(
        self, warm_up_s: float, seconds: float, server: psutil.Process, commits: Callable[[], int] = lambda: 0
    ) -> Counts:
        """Attach all workers, warm up, measure. ``commits``: number of transactions so far."""
        self._attach(self._shard.peer, "trajectories", rows=1_000_000, endpoint="ipc:///bench/shard")
        self._attach(self._parameters, "parameters", endpoint="ipc:///bench/parameters")
        self._attach(self._trainer.peer, "trainer")
        for worker in self._workers:
            self._attach(worker.peer, "rollout", capacity=self._capacity)
            worker.report()
        self._trainer.start()
        pinging = asyncio.create_task(self._ping())
        await asyncio.sleep(warm_up_s)
        self._counts = Counts()
        started, reports, cpu_s, before = time.perf_counter(), self._reports(), cpu_seconds(server), commits()
        await asyncio.sleep(seconds)
        counts = self._counts
        counts.seconds = time.perf_counter() - started
        counts.cpu_s = cpu_seconds(server) - cpu_s
        counts.reports = self._reports() - reports
        counts.commits = commits() - before
        pinging.cancel()
        return counts

    def close(self) -> None:
        others = (self._shard.peer, self._parameters, self._trainer.peer)
        for peer in (*others, *(worker.peer for worker in self._workers)):
            peer.socket.close(linger_ms=0)

    def _reports(self) -> int:
        return sum(worker.reports for worker in self._workers)

    async def _ping(self) -> None:
        while True:
            await asyncio.sleep(1)
            for peer in (self._shard.peer, self._parameters, self._trainer.peer):
                peer.ask(Ping(), ignore)

    def _attach(self, peer: Peer, role: str, *, rows: int = 0, endpoint: str = "", capacity: int = 0) -> None:
        attach = Attach(
            worker=peer.worker,
            name=peer.name,
            role=role,
            rows=rows,
            prompts_sha="bench",
            endpoint=endpoint,
            capacity=capacity,
        )
        peer.ask(attach, ignore)


def cpu_seconds(server: psutil.Process) -> float:
    """CPU time that a process has used."""
    times = server.cpu_times()
    return float(times.user + times.system)


def _all_done(reply: Reply) -> int:
    """Number of completed operations; all must be completed."""
    if not isinstance(reply, Results) or any(result.code is not None for result in reply.results):
        raise RuntimeError(f"an operation was refused: {reply}")
    return len(reply.results)


def _push(assign: Assign, worker: WorkerId) -> RegisterPush:
    return RegisterPush(
        group=assign.group,
        lease=assign.lease,
        worker=worker,
        shard=0,
        sha=SHA,
        nbytes=40_000,
        truncated=False,
        segments=[Segment(assign.lineage, assign.version, 4_096)],
        samples=[512] * 8,
        sequence_tokens=4_096,
    )


def _occupy(assign: Assign) -> RegisterOccupy:
    return RegisterOccupy(group=assign.group, lease=assign.lease)
