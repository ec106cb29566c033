"""The server bounds what ZeroMQ leaves unbounded: endless messages, silent connections, the number of connections."""

import asyncio
import resource
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from bench.hostile import BIG, GREETING, TINY, Hostile
from staleflow.cli.main import main
from staleflow.net.allow_list import AllowList
from staleflow.net.client import BlockingClient, Client
from staleflow.net.endpoint import Endpoint
from staleflow.net.errors import Unavailable
from staleflow.net.keys import read_key
from staleflow.net.limits import TransportLimits
from staleflow.net.listener import Listener
from staleflow.net.transport import Sockets
from staleflow.protocols.consistency.ids import WorkerId
from staleflow.protocols.wire.messages import Done, Drain

if TYPE_CHECKING:
    from tests.net.conftest import Network

MIB = 1 << 20
LOOPBACK = "tcp://127.0.0.1:0"
GIVE_UP_S = 60.0
"""Time limit for one exchange of a hostile peer."""
FAST = TransportLimits(heartbeat_s=0.4, retry_s=0.5, retry_cap_s=0.6)
SMALL = replace(FAST, max_message_bytes=MIB, idle_s=30.0)


@pytest.fixture
async def hostile() -> AsyncIterator[list[Hostile]]:
    opened: list[Hostile] = []
    yield opened
    for peer in opened:
        peer.close()


def serve(network: "Network", limits: TransportLimits) -> tuple[Endpoint, int]:
    endpoint = network.endpoint(LOOPBACK, lambda call: call.reply(Done()), limits=limits)
    return endpoint, int(endpoint.address.rpartition(":")[2])


async def connected(port: int, *, greets: bool = True) -> Hostile:
    peer = await asyncio.to_thread(Hostile, port, timeout_s=GIVE_UP_S)
    if greets:
        await asyncio.to_thread(peer.greet)
    return peer


def cut(endpoint: Endpoint) -> int:
    link = endpoint._link  # pyright: ignore[reportPrivateUsage]
    assert isinstance(link, Listener)
    return link.connections.cut


def unfinished(endpoint: Endpoint) -> int:
    """Return the bytes of the only connection that belong to no complete message yet."""
    link = endpoint._link  # pyright: ignore[reportPrivateUsage]
    assert isinstance(link, Listener)
    link.connections.scan()
    [found] = link.connections.unfinished()
    return found


async def test_a_message_without_an_end_is_cut_off(network: "Network", hostile: list[Hostile]) -> None:
    endpoint, port = serve(network, SMALL)
    honest = network.client(endpoint.address)
    await honest.ask(Drain(why=""), Done)
    peer = await connected(port)
    hostile.append(peer)
    peer.ping()
    await network.until(lambda: endpoint.peers != ["worker-0.1"])
    await asyncio.to_thread(peer.send, BIG * 2)  # a large message may be in flight
    await asyncio.sleep(1.5)
    assert not peer.is_cut()
    peer.socket.settimeout(GIVE_UP_S)  # ``is_cut`` has made it non-blocking
    with suppress(OSError):  # the server may cut it before all is sent
        await asyncio.to_thread(peer.send, BIG * 2)
    await network.until(peer.is_cut)
    assert cut(endpoint) == 1
    assert await honest.ask(Drain(why=""), Done) == Done()
    assert endpoint.counts.malformed == endpoint.counts.oversize == 0


async def test_who_has_said_nothing_yet_may_send_little(network: "Network", hostile: list[Hostile]) -> None:
    endpoint, port = serve(network, replace(SMALL, max_message_bytes=256 * MIB))
    for greets in (False, True):
        peer = await connected(port, greets=greets)
        hostile.append(peer)
        with suppress(OSError):  # the server may cut it before all is sent
            if not greets:
                peer.send(GREETING)
            peer.send(BIG)  # a megabyte of an unfinished first message
        await network.until(peer.is_cut)
    assert cut(endpoint) >= 1  # ZeroMQ itself may have cut the first one: its handshake is invalid


async def test_many_small_unfinished_messages_together_are_too_much(network: "Network", hostile: list[Hostile]) -> None:
    endpoint, port = serve(network, replace(SMALL, max_message_bytes=64 * MIB, max_unfinished_bytes=9 * MIB))
    for _ in range(6):
        hostile.append(await connected(port))
        hostile[-1].ping()
    await network.until(lambda: endpoint.counts.pings == 6)
    await asyncio.sleep(1.2)  # a scan has found a ping of each of them
    for peer in hostile:
        with suppress(OSError):  # the server may cut it before all is sent
            await asyncio.to_thread(peer.send, BIG * 2)
    await network.until(lambda: sum(peer.is_cut() for peer in hostile) == 2)  # 12 MiB; 9 may stay
    await asyncio.sleep(1.2)
    assert sum(peer.is_cut() for peer in hostile) == 2
    assert cut(endpoint) == 2


async def test_a_connection_that_says_nothing_is_cut(network: "Network", hostile: list[Hostile]) -> None:
    endpoint, port = serve(network, replace(SMALL, idle_s=3.0))
    honest = network.client(endpoint.address)
    await honest.ask(Drain(why=""), Done)
    began = time.monotonic()
    hostile += [await connected(port, greets=greets) for greets in (False, True, True)]
    hostile[2].ping()  # the only ping that it sends
    await network.until(lambda: all(peer.is_cut() for peer in hostile))
    assert time.monotonic() - began > 2.5
    await network.until(lambda: endpoint.peers == ["worker-0.1"])
    assert await honest.ask(Drain(why=""), Done) == Done()


async def test_of_too_many_connections_the_silent_ones_go(network: "Network", hostile: list[Hostile]) -> None:
    endpoint, port = serve(network, replace(SMALL, max_connections=20))
    honest = [network.client(endpoint.address, f"worker-{number}.1") for number in range(5)]
    for client in honest:
        await client.ask(Drain(why=""), Done)
    hostile += [await asyncio.to_thread(Hostile, port) for _ in range(60)]
    await network.until(lambda: sum(peer.is_cut() for peer in hostile) >= 45)
    for client in honest:
        assert await client.ask(Drain(why=""), Done) == Done()
    assert len(endpoint.peers) == 5
    assert sum(peer.is_cut() for peer in hostile) == 45


async def test_large_messages_in_a_row_are_no_offence(network: "Network") -> None:
    """The messages are also legal at the start of a connection: the client sends a small one first."""
    endpoint, _ = serve(network, replace(SMALL, max_message_bytes=32 * MIB, max_unfinished_bytes=40 * MIB))
    client = network.client(
        endpoint.address, limits=replace(FAST, max_message_bytes=32 * MIB, retry_s=20, retry_cap_s=20)
    )
    payload = bytes(24 * MIB)
    for _ in range(8):
        assert await client.ask(Drain(why=""), Done, [payload]) == Done()
    assert cut(endpoint) == 0


async def test_a_connection_that_is_cut_comes_back_by_itself(network: "Network") -> None:
    endpoint, _ = serve(network, replace(SMALL, idle_s=0.6))
    quiet = replace(FAST, heartbeat_s=60.0)  # sends nothing unless called
    client = Client(endpoint.address, worker=WorkerId("worker-0.1"), limits=quiet)
    network.clients.append(client)
    await client.ask(Drain(why=""), Done)
    await network.until(lambda: cut(endpoint) == 1)
    assert await client.ask(Drain(why=""), Done) == Done()


@pytest.mark.parametrize("with_keys", [False, True])
async def test_what_travels_is_counted_to_the_byte(network: "Network", tmp_path: Path, *, with_keys: bool) -> None:
    """A wrong count would eventually cut an honest connection, as only its handshake is outside whole messages."""
    served, asking = Sockets(), Sockets()
    if with_keys:
        assert main(["keygen", str(tmp_path / "keys")]) == 0
        served = Sockets(read_key(tmp_path / "keys/server.key"), AllowList(tmp_path / "keys/allowed.toml"))
        asking = Sockets(read_key(tmp_path / "keys/admin.key"))
    # neither a heartbeat nor a retry comes between a call and its measurement
    rare = TransportLimits(heartbeat_s=600, retry_s=600, retry_cap_s=600, idle_s=600)
    endpoint = Endpoint(LOOPBACK, on_call=lambda call: call.reply(Done()), limits=rare, transport=served)
    network.endpoints.append(endpoint)
    network.tasks.append(asyncio.create_task(endpoint.serve()))
    client = Client(endpoint.address, worker=WorkerId("admin.1"), limits=rare, transport=asking)
    network.clients.append(client)
    frames = [bytes(size) for size in (0, 1, 221, 222, 223, 254, 255, 256, 257, 4_096, 65_536, 1_000_000)]
    left: set[int] = set()
    for number in range(60):
        await client.ask(Drain(why="x" * number * 8), Done, frames[: number % len(frames)] * 3)
        left.add(unfinished(endpoint))
    assert len(left) == 1
    assert 100 < left.pop() < 1_000


async def test_a_server_that_stood_still_blames_nobody(network: "Network") -> None:
    """Messages that arrived during the stop lie unread in the server's sockets."""
    endpoint, _ = serve(network, replace(SMALL, idle_s=2.0))
    client = network.client(endpoint.address)
    await client.ask(Drain(why=""), Done)
    unfinished(endpoint)  # a scan: from here on the connection counts as silent
    time.sleep(4.0)  # noqa: ASYNC251 - the loop stands still, as after SIGSTOP
    await asyncio.sleep(0.3)
    assert await client.ask(Drain(why=""), Done) == Done()
    assert cut(endpoint) == 0


SERVER = """
import asyncio, resource, sys
import uvloop
from dataclasses import replace
from staleflow.protocols.wire.messages import Done
from staleflow.net.endpoint import Endpoint
from staleflow.process.host import reuse_memory
from staleflow.net.limits import TransportLimits

MIB = 1 << 20
LIMITS = TransportLimits(max_message_bytes=32 * MIB, max_unfinished_bytes=64 * MIB, max_growth_bytes=64 * MIB)

async def main():
    reuse_memory()
    if len(sys.argv) > 1:
        resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[1])))
    endpoint = Endpoint("tcp://127.0.0.1:0", on_call=lambda call: call.reply(Done()), limits=LIMITS)
    print(endpoint.address, flush=True)
    await endpoint.serve()

with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
    runner.run(main())
"""


@pytest.fixture
def server(request: pytest.FixtureRequest) -> "Iterator[tuple[subprocess.Popen[str], str]]":
    command = [sys.executable, "-c", SERVER, *getattr(request, "param", [])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


def peak_bytes(pid: int) -> int:
    """Return the peak resident memory of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


@pytest.mark.parametrize(("data", "least"), [(BIG, 700 * MIB), (TINY, 24 * MIB)], ids=["large", "small"])
def test_a_flood_does_not_fill_the_memory_of_a_server(
    server: "tuple[subprocess.Popen[str], str]", data: bytes, least: int
) -> None:
    """Several peers flood at once and reconnect whenever they are cut off, while others are served.

    Without a bound, the bytes sent here would take more than 700 MiB.
    """
    process, address = server
    rest = peak_bytes(process.pid)
    honest = BlockingClient(address, worker=WorkerId("honest.1"))
    sent, until = [0], time.monotonic() + 60

    def attack() -> None:
        while sum(sent) < least and time.monotonic() < until:
            with suppress(OSError), closing(Hostile(int(address.rpartition(":")[2]))) as peer:
                peer.greet()
                peer.ping()
                while sum(sent) < least and time.monotonic() < until:
                    sent.append(peer.send(data))

    attackers = [threading.Thread(target=attack) for _ in range(3)]
    for attacker in attackers:
        attacker.start()
    served = 0
    while any(attacker.is_alive() for attacker in attackers):
        with suppress(Unavailable):
            served += honest.ask(Drain(why=""), Done, timeout_s=5) == Done()
        time.sleep(0.02)
    honest.close()
    assert sum(sent) >= least
    assert served > 10
    assert peak_bytes(process.pid) - rest < 400 * MIB, peak_bytes(process.pid) - rest


@pytest.mark.parametrize("server", [["1024"]], indirect=True)
def test_idle_connections_do_not_exhaust_descriptors(server: "tuple[subprocess.Popen[str], str]") -> None:
    """Open 2,000 connections to a server that may open 1,024 files."""
    process, address = server
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(soft, 4_096), hard), hard))
    port = int(address.rpartition(":")[2])
    honest = BlockingClient(address, worker=WorkerId("honest.1"))
    peers: list[Hostile] = []
    try:
        assert honest.ask(Drain(why=""), Done) == Done()
        for number in range(2_000):
            peers.append(Hostile(port))
            if number % 100 == 0:
                assert honest.ask(Drain(why=""), Done, timeout_s=GIVE_UP_S) == Done()
        late = BlockingClient(address, worker=WorkerId("late.1"))
        try:
            assert late.ask(Drain(why=""), Done, timeout_s=GIVE_UP_S) == Done()
        finally:
            late.close()
        assert honest.ask(Drain(why=""), Done, timeout_s=GIVE_UP_S) == Done()
        deadline = time.monotonic() + GIVE_UP_S
        while len(list(Path(f"/proc/{process.pid}/fd").iterdir())) > 1_024 - 64:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        honest.close()
        for peer in peers:
            peer.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_private_memory_is_this_process_own() -> None:
    # In a process of its own: one that reuses freed memory may already hold the pages.
    grows = """
from staleflow.net.connection_limits import private_bytes
with open("/proc/self/statm", "rb") as statm:
    before = private_bytes(statm.fileno())
    grown = bytearray(b"x") * (64 << 20)
    print(private_bytes(statm.fileno()) - before)
"""
    printed = subprocess.run([sys.executable, "-c", grows], capture_output=True, text=True, check=True).stdout
    assert 60 * MIB < int(printed) < 80 * MIB
