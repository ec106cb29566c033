"""Measure the cost of keys, and the cost of a flood to a server: CURVE beside plain TCP and a Unix socket, in one run.

    python -m bench.curve                       round trips, bytes, handshakes, floods
    python -m bench.curve --seconds 2

Server and clients are the product's own ``Endpoint`` and ``Client``, one process each, on the two cores of one machine.
A flood is a message that never ends, from several handcrafted connections, with the default limits.
"""

import argparse
import asyncio
import multiprocessing
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Generator, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

import psutil
import uvloop

from bench.hostile import BIG, TINY, Hostile
from bench.progress import tracked
from staleflow.cli.main import main as staleflow
from staleflow.net.allow_list import AllowList
from staleflow.net.client import Client
from staleflow.net.endpoint import Call, Endpoint
from staleflow.net.keys import read_key
from staleflow.net.limits import TransportLimits
from staleflow.net.listener import Listener
from staleflow.net.transport import Sockets, Transport
from staleflow.protocols.consistency.ids import Step, WorkerId
from staleflow.protocols.wire.messages import Done, Metrics

MIB = 1 << 20
UNDER_WAY = 8
"""Number of requests that a client keeps under way when throughput is measured."""
HANDSHAKES = 100
FLOOD_PEERS = 4
ME = WorkerId("bench.1")
ASK = Metrics(worker=ME, step=Step(0), values={})


class Row(NamedTuple):
    """One line of the table."""

    what: str
    round_trips: float
    """Calls a second, one at a time."""
    pipelined: float
    """Calls a second, ``UNDER_WAY`` at a time."""
    megabytes: float
    """Messages of 1 MiB a second."""
    handshake_ms: float
    """Time from a new client to its first reply."""


def serve(address: str, keys: str, guarded: bool, to_parent: "multiprocessing.SimpleQueue[str]") -> None:
    """A server that replies to every request until it is killed."""

    async def serving() -> None:
        folder = Path(keys)
        sockets = Sockets(read_key(folder / "server.key"), AllowList(folder / "allowed.toml")) if keys else Sockets()
        endpoint = Endpoint(address, on_call=_answer, transport=sockets)
        link = endpoint._link  # pyright: ignore[reportPrivateUsage]
        if not guarded and isinstance(link, Listener):
            link.connections.poll = lambda: None  # type: ignore[method-assign]
        to_parent.put(endpoint.address)
        await endpoint.serve()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serving())


def _answer(call: Call) -> None:
    call.reply(Done())


@contextmanager
def server(address: str, keys: str = "", *, guarded: bool = True) -> Generator[tuple[str, int]]:
    """Its real address and process id."""
    context = multiprocessing.get_context("spawn")
    queue: multiprocessing.SimpleQueue[str] = context.SimpleQueue()
    process = context.Process(target=serve, args=(address, keys, guarded, queue), daemon=True)
    process.start()
    assert process.pid is not None
    try:
        yield queue.get(), process.pid
    finally:
        process.kill()
        process.join()


async def measure(what: str, address: str, transport: Transport, seconds: float) -> Row:
    """One line of the table."""
    client = Client(address, worker=ME, transport=transport)
    await client.ask(ASK, Done)
    single = await _rate(lambda: client.ask(ASK, Done), 1, seconds)
    pipelined = await _rate(lambda: client.ask(ASK, Done), UNDER_WAY, seconds)
    payload = [memoryview(bytes(MIB))]
    megabytes = await _rate(lambda: client.ask(ASK, Done, payload), UNDER_WAY, seconds)
    client.close()
    began = time.perf_counter()
    for _ in range(HANDSHAKES):
        fresh = Client(address, worker=ME, transport=transport)
        await fresh.ask(ASK, Done)
        fresh.close()
    each_ms = (time.perf_counter() - began) / HANDSHAKES * 1_000
    return Row(what, single, pipelined, megabytes * MIB / 1e6, each_ms)


async def _rate(ask: Callable[[], Awaitable[Done]], at_once: int, seconds: float) -> float:
    """Calls a second."""
    until, done = time.perf_counter() + seconds, [0]

    async def one_after_another() -> None:
        while time.perf_counter() < until:
            await ask()
            done[0] += 1

    began = time.perf_counter()
    await asyncio.gather(*(one_after_another() for _ in range(at_once)))
    return done[0] / (time.perf_counter() - began)


class Flood(NamedTuple):
    """Effect of a flood."""

    what: str
    sent_mib: float
    rest_mib: float
    peak_mib: float
    served: int
    """Calls of an honest client meanwhile."""
    slowest_ms: float


def flood(what: str, data: bytes, seconds: float, *, guarded: bool, most: int) -> Flood:
    """Several peers send a message without an end while an honest client sends requests."""
    with server("tcp://127.0.0.1:0", guarded=guarded) as (address, pid):
        watched = psutil.Process(pid)
        rest = watched.memory_info().rss
        port, until, sent = int(address.rpartition(":")[2]), time.monotonic() + seconds, [0]

        def attack() -> None:
            while time.monotonic() < until and sum(sent) < most:
                with suppress(OSError):
                    peer = Hostile(port)
                    try:
                        peer.greet()
                        peer.ping()
                        while time.monotonic() < until and sum(sent) < most:
                            sent.append(peer.send(data))
                    finally:
                        peer.close()

        attackers = [threading.Thread(target=attack) for _ in range(FLOOD_PEERS)]
        for attacker in attackers:
            attacker.start()
        served = asyncio.run(_honest(address, until))
        for attacker in attackers:
            attacker.join()
        peak = int(Path(f"/proc/{pid}/status").read_text().partition("VmHWM:")[2].split()[0]) * 1024
    return Flood(what, sum(sent) / MIB, rest / MIB, peak / MIB, len(served), max(served) * 1_000)


async def _honest(address: str, until: float) -> list[float]:
    client = Client(address, worker=ME)
    waited: list[float] = []
    while time.monotonic() < until:
        began = time.perf_counter()
        await client.ask(ASK, Done)
        waited.append(time.perf_counter() - began)
        await asyncio.sleep(0.02)
    client.close()
    return waited


def rows(seconds: float) -> Iterator[Row]:
    """Measure plain and CURVE alternately."""
    with tempfile.TemporaryDirectory(prefix="sf-") as folder:
        keys = f"{folder}/keys"
        with redirect_stdout(None):
            staleflow(["keygen", keys])
        guarded = Sockets(read_key(Path(keys) / "trainer.key"))
        for what, bind, own, transport in (
            ("Unix socket", f"ipc://{folder}/s", "", Sockets()),
            ("TCP, plain", "tcp://127.0.0.1:0", "", Sockets()),
            ("TCP, CURVE", "tcp://127.0.0.1:0", keys, guarded),
        ):
            with server(bind, own) as (address, _):
                yield uvloop.run(measure(what, address, transport, seconds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    parser.add_argument("--flood-seconds", type=float, default=5.0)
    options = parser.parse_args()
    print("| transport | round trips/s | 8 at once/s | MB/s, 1 MiB messages | connect to first answer, ms |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for row in rows(options.seconds):
        print(
            f"| {row.what} | {row.round_trips:,.0f} | {row.pipelined:,.0f} | {row.megabytes:,.0f} |"
            f" {row.handshake_ms:.2f} |"
        )
    limits = TransportLimits()
    print(
        f"\nLimits: {limits.max_unfinished_bytes / MIB:,.0f} MiB unfinished, {limits.max_growth_bytes / MIB:,.0f} grown"
    )
    print("| flood | sent MiB | at rest, MiB | peak, MiB | honest calls | slowest, ms |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    floods = (
        ("64 KiB frames", BIG, True, 1 << 50),
        ("empty frames", TINY, True, 1 << 50),
        ("64 KiB frames, not guarded", BIG, False, 2_000 * MIB),
        ("empty frames, not guarded", TINY, False, 60 * MIB),
    )
    for what, data, guarded, most in tracked("floods", floods, itemgetter(0)):
        it = flood(what, data, options.flood_seconds, guarded=guarded, most=most)
        print(
            f"| {it.what} | {it.sent_mib:,.0f} | {it.rest_mib:,.0f} | {it.peak_mib:,.0f} | {it.served:,} |"
            f" {it.slowest_ms:,.0f} |"
        )


if __name__ == "__main__":
    main()
