"""The raw limit: messages of the same number and size, against a server that only returns some bytes."""

import asyncio
import time
from collections.abc import Callable

import psutil
import zmq

from bench.control_load import LIMITS, LINEAGE, OPS_A_MESSAGE, SHA, UNDER_WAY, Counts, cpu_seconds
from staleflow.net.zmq_stream import DrainedSocket
from staleflow.protocols.consistency.ids import GroupId, LeaseId, Segment, Version, WorkerId
from staleflow.protocols.wire.codec import encode_reply, encode_request
from staleflow.protocols.wire.messages import (
    Assign,
    Commands,
    InstanceStats,
    Operations,
    RegisterOccupy,
    RegisterPush,
    Report,
    Result,
    Results,
)

GROUPS_A_REPORT = 4
"""Approximate number of groups that one reply assigns to a worker when many workers are attached."""


def serve_echo(address: str) -> None:
    """A blocking ROUTER loop: reports get commands, operations get results, and all replies are encoded once."""
    socket: zmq.Socket[bytes] = zmq.Context[zmq.Socket[bytes]]().socket(zmq.ROUTER)
    socket.bind(address)
    group, lease = GroupId(1_000_000), LeaseId(1_000_000)
    assign = Assign(group=group, lease=lease, lineage=LINEAGE, version=Version(100), shard=0)
    commands = encode_reply(1_000, Commands(first=1_000, commands=[assign] * GROUPS_A_REPORT, version=Version(100)))
    results = encode_reply(1_000, Results(results=[Result()] * OPS_A_MESSAGE))
    while True:
        route, request = socket.recv_multipart()
        socket.send_multipart((route, results if len(request) > 1_000 else commands))


def _messages(worker: WorkerId) -> tuple[bytes, bytes, bytes]:
    """A report, a message of pushes and a message of occupies, of the usual size."""
    push = RegisterPush(
        group=GroupId(1_000_000),
        lease=LeaseId(1_000_000),
        worker=worker,
        shard=0,
        sha=SHA,
        nbytes=40_000,
        truncated=False,
        segments=[Segment(LINEAGE, Version(100), 4_096)],
        samples=[512] * 8,
        sequence_tokens=4_096,
    )
    occupy = RegisterOccupy(group=push.group, lease=push.lease)
    held = [LeaseId(1_000_000)] * GROUPS_A_REPORT
    report = Report(worker=worker, ack=1_000, held=held, stats=InstanceStats(version=Version(100)))
    return (
        encode_request(1_000, report),
        encode_request(1_000, Operations(ops=[push] * OPS_A_MESSAGE)),
        encode_request(1_000, Operations(ops=[occupy] * OPS_A_MESSAGE)),
    )


class Asker:
    """One DEALER that sends fixed bytes and runs a callback with each reply."""

    def __init__(self, address: str, name: str, then: Callable[[float], None]) -> None:
        self._then = then
        self._sent: list[float] = []
        self.socket = DrainedSocket(zmq.DEALER, num_heads=1, limits=LIMITS, on_message=self._receive)
        self.socket.zmq.set(zmq.ROUTING_ID, name.encode())
        self.socket.zmq.connect(address)
        self.socket.start()

    def ask(self, request: bytes) -> None:
        self._sent.append(time.perf_counter())
        self.socket.send((request,))

    def _receive(self, head: list[bytes], frames: list[memoryview], oversize: bool) -> None:
        self._then(time.perf_counter() - self._sent.pop(0))


async def echo_load(address: str, *, workers: int, seconds: float, warm_up_s: float, server: psutil.Process) -> Counts:
    """Rounds of ``OPS_A_MESSAGE`` groups: their reports, one message of pushes, one of occupies."""
    report, push, occupy = _messages(WorkerId("rollout-100.bench"))
    counts = Counts()
    per_round = OPS_A_MESSAGE // GROUPS_A_REPORT

    def on_report(_: float) -> None:
        counts.reserves += GROUPS_A_REPORT

    def on_push(latency_s: float) -> None:
        counts.pushes += OPS_A_MESSAGE
        counts.latencies_s.append(latency_s)
        start_round()

    def on_occupy(latency_s: float) -> None:
        counts.occupies += OPS_A_MESSAGE
        counts.latencies_s.append(latency_s)

    reporters = [Asker(address, f"rollout-{number}", on_report) for number in range(workers)]
    pushes, occupies = Asker(address, "pushes", on_push), Asker(address, "occupies", on_occupy)
    turn = 0

    def start_round() -> None:
        nonlocal turn
        for _ in range(per_round):
            reporters[turn % workers].ask(report)
            turn += 1
        pushes.ask(push)
        occupies.ask(occupy)

    for _ in range(UNDER_WAY):
        start_round()
    await asyncio.sleep(warm_up_s)
    counts = Counts()
    started, cpu_s = time.perf_counter(), cpu_seconds(server)
    await asyncio.sleep(seconds)
    counts.cpu_s = cpu_seconds(server) - cpu_s
    counts.seconds = time.perf_counter() - started
    for asker in (pushes, occupies, *reporters):
        asker.socket.close(linger_ms=0)
    return counts
