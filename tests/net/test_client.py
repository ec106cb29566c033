"""A client receives its answer despite any fault of the connection, or the caller gets a clear error."""

import asyncio
import errno
import os
import socket
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec
import pytest
import zmq

from staleflow.configs.errors import ConfigError
from staleflow.net.client import BlockingClient, Client, worker_id
from staleflow.net.endpoint import Call, Endpoint
from staleflow.net.errors import Refused, Unavailable
from staleflow.net.limits import TransportLimits
from staleflow.net.retry import Backoff
from staleflow.net.transport import Link, OnMessage, Sockets
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.consistency.ids import WorkerId
from staleflow.protocols.wire.codec import ProtocolError, encode_reply
from staleflow.protocols.wire.messages import PROTOCOL, Done, GetStatus, Pong, Refusal, RelayStatus, Status

if TYPE_CHECKING:
    from tests.net.conftest import Network


def echo(call: Call) -> None:
    call.reply(Done(), call.frames)


async def bound_again(network: "Network", address: str) -> Endpoint:
    """Bind an endpoint at an address that its former owner is still releasing."""
    async with asyncio.timeout(60):
        while True:
            try:
                return network.endpoint(address, echo)
            except ConfigError:
                await asyncio.sleep(0.01)


async def test_an_answer_of_the_expected_type_is_returned(network: "Network", ipc: str) -> None:
    network.endpoint(ipc, lambda call: call.reply(RelayStatus(parent="a")))
    assert await network.client(ipc).ask(GetStatus(), Status) == RelayStatus(parent="a")


async def test_an_answer_of_another_type_is_the_peers_fault(network: "Network", ipc: str) -> None:
    network.endpoint(ipc, echo)
    with pytest.raises(ProtocolError, match=f"{ipc} answered GetStatus with Done, not Status"):
        await network.client(ipc).ask(GetStatus(), Status)


async def test_a_refusal_is_raised_with_code_and_detail(network: "Network", ipc: str) -> None:
    network.endpoint(ipc, lambda call: call.refuse(Code.FENCED, "term 3 is over"))
    with pytest.raises(Refused, match="fenced: term 3 is over") as caught:
        await network.client(ipc).call(GetStatus())
    assert (caught.value.code, caught.value.detail) == (Code.FENCED, "term 3 is over")


async def test_a_busy_server_is_asked_again_with_the_same_id(network: "Network", ipc: str) -> None:
    ids: list[int] = []

    def busy_twice(call: Call) -> None:
        ids.append(call.id)
        if len(ids) < 3:
            call.refuse(Code.BUSY, "full", retry_after_ms=20)
        else:
            call.reply(Done())

    network.endpoint(ipc, busy_twice)
    client = network.client(ipc, limits=replace(network.limits, retry_s=20, retry_cap_s=20))
    assert (await client.call(GetStatus()))[0] == Done()
    assert ids == [1, 1, 1]


async def test_a_server_that_is_busy_for_a_limited_time_refuses_after_it(network: "Network", ipc: str) -> None:
    clock = asyncio.get_running_loop().time
    asked: list[float] = []

    def busy(call: Call) -> None:
        asked.append(clock())
        limit_ms = 300 if len(asked) > 2 else 0
        call.reply(Refusal(code=Code.BUSY, detail="taken", retry_after_ms=20, retry_for_ms=limit_ms))

    network.endpoint(ipc, busy)
    with pytest.raises(Refused, match="busy: taken"):
        await network.client(ipc).ask(GetStatus(), Status, timeout_s=30)
    assert clock() - asked[2] >= 0.3, "the limit counts from the first answer that has one"


async def test_a_server_that_stays_busy_is_unavailable_and_says_why(network: "Network", ipc: str) -> None:
    network.endpoint(ipc, lambda call: call.refuse(Code.BUSY, "the disk is full", retry_after_ms=20))
    with pytest.raises(Unavailable, match=rf"no answer from {ipc} for \d+\.\d s \(busy: the disk is full\)") as caught:
        await network.client(ipc).call(GetStatus(), timeout_s=1.0)
    assert caught.value.why == "the disk is full"
    assert 0.99 <= caught.value.waited_s < 20


async def test_without_a_server_the_address_and_the_time_are_named(network: "Network", ipc: str) -> None:
    client = network.client(ipc)
    with pytest.raises(Unavailable, match=rf"no answer from {ipc} for \d+\.\d s") as caught:
        await client.call(GetStatus(), timeout_s=0.2)
    assert caught.value.address == ipc
    assert 0.19 < caught.value.waited_s < 20


async def test_a_call_made_before_the_server_starts_is_answered(network: "Network", ipc: str) -> None:
    call = asyncio.create_task(network.client(ipc).call(GetStatus(), timeout_s=None))
    await asyncio.sleep(0.1)
    network.endpoint(ipc, echo)
    assert (await call)[0] == Done()


@pytest.mark.parametrize("over", ["ipc", "tcp"])
async def test_a_call_survives_the_restart_of_its_server(
    network: "Network", ipc: str, ports: list[int], over: str
) -> None:
    held: list[Call] = []
    first = network.endpoint(ipc if over == "ipc" else f"tcp://127.0.0.1:{ports[0]}", held.append)
    calls = [asyncio.create_task(network.client(first.address).call(GetStatus(), [b"payload"])) for _ in range(20)]
    await network.until(lambda: len(held) >= 20)
    first.close()
    await bound_again(network, first.address)
    async with asyncio.timeout(60):
        answers = await asyncio.gather(*calls)
    assert [(reply, bytes(frames[0])) for reply, frames in answers] == [(Done(), b"payload")] * 20
    assert all(call.done for call in held)


async def test_a_dead_connection_is_replaced(network: "Network", ports: list[int]) -> None:
    """A listener accepts the connection and never sends a byte; then the real server takes its port."""
    address = f"tcp://127.0.0.1:{ports[0]}"
    with socket.create_server(("127.0.0.1", ports[0])) as mute:
        call = asyncio.create_task(network.client(address).call(GetStatus(), timeout_s=None))
        connection, _ = await asyncio.to_thread(mute.accept)
    with connection:
        network.endpoint(address, echo)
        async with asyncio.timeout(60):
            assert (await call)[0] == Done()


class Scarce(Sockets):
    """Sockets that count the requests of clients, and grant none while ``out``."""

    def __init__(self, reason: Exception) -> None:
        super().__init__()
        self.reason = reason
        self.out = False
        self.given = self.refused = 0

    def connect(self, address: str, route: bytes, *, limits: TransportLimits, on_message: OnMessage) -> Link:
        if self.out:
            self.refused += 1
            raise self.reason
        self.given += 1
        return super().connect(address, route, limits=limits, on_message=on_message)


@pytest.mark.parametrize("reason", [zmq.ZMQError(errno.EMFILE), OSError(errno.EMFILE, os.strerror(errno.EMFILE))])
async def test_a_connection_that_cannot_be_replaced_now_is_replaced_later(
    network: "Network", ipc: str, caplog: pytest.LogCaptureFixture, reason: Exception
) -> None:
    mute, sockets = network.router(ipc), Scarce(reason)
    client = Client(ipc, worker=WorkerId("worker-0.1"), limits=network.limits, transport=sockets)
    network.clients.append(client)
    lasting = asyncio.create_task(client.call(GetStatus(), timeout_s=None))
    ending = asyncio.create_task(client.call(GetStatus(), timeout_s=2 * network.limits.silence_s))
    await mute.hear()
    sockets.out = True
    await network.until(lambda: sockets.refused >= 2)
    async with asyncio.timeout(60):
        with pytest.raises(Unavailable):
            await ending
        with pytest.raises(Unavailable):
            await client.call(GetStatus(), timeout_s=0.1)
    assert f"no new connection to {ipc} for now: Too many open files" in caplog.text.replace("[Errno 24] ", "")
    mute.zmq.close(0)
    await bound_again(network, ipc)
    sockets.out = False
    async with asyncio.timeout(60):
        assert (await lasting)[0] == Done()
        assert (await client.call(GetStatus()))[0] == Done()
    assert sockets.given == 2


@pytest.mark.parametrize(("address", "step"), [("ipc://{}", "connect"), ("tcp://127.0.0.1:1", "get_monitor_socket")])
async def test_a_socket_that_cannot_be_made_whole_is_closed(
    ipc: str, monkeypatch: pytest.MonkeyPatch, address: str, step: str
) -> None:
    made: list[zmq.Socket[bytes]] = []
    context = zmq.Context[zmq.Socket[bytes]]

    def noted(self: "zmq.Context[zmq.Socket[bytes]]", kind: int) -> "zmq.Socket[bytes]":
        made.append(zmq.Socket(self, kind))
        return made[-1]

    def fails(*_: object, **__: object) -> None:
        raise zmq.ZMQError(errno.EMFILE)

    monkeypatch.setattr(context, "socket", noted)
    monkeypatch.setattr(zmq.Socket, step, fails)
    with pytest.raises(zmq.ZMQError):
        Sockets().connect(
            address.format(ipc.removeprefix("ipc://")), b"worker-0.1/0", limits=TransportLimits(), on_message=print
        )
    assert [socket.closed for socket in made] == [True]


async def test_what_is_sent_again_all_the_time_leaves_room_for_pings(network: "Network", ipc: str) -> None:
    endpoint, sockets = network.endpoint(ipc, lambda call: None), Scarce(OSError())
    limits = replace(network.limits, retry_s=0.02, retry_cap_s=0.04)  # the client sends continuously
    client = Client(ipc, worker=WorkerId("worker-0.1"), limits=limits, transport=sockets)
    network.clients.append(client)
    call = asyncio.create_task(client.call(GetStatus(), timeout_s=None))
    await network.until(lambda: endpoint.counts.pings >= 5)  # more than three heartbeats
    assert endpoint.counts.repeated > 5
    assert sockets.given == 1
    call.cancel()
    await asyncio.wait((call,))


async def test_a_slow_answer_is_waited_for_while_the_server_lives(network: "Network", ipc: str) -> None:
    held: list[Call] = []
    endpoint = network.endpoint(ipc, held.append)
    call = asyncio.create_task(network.client(ipc).call(GetStatus()))
    await asyncio.sleep(2 * network.limits.silence_s)
    await network.until(lambda: endpoint.counts.repeated > 1 and endpoint.counts.pings > 1)
    assert endpoint.counts.calls == 1
    held[0].reply(Done())
    assert (await call)[0] == Done()


async def test_a_client_whose_own_loop_was_held_up_keeps_its_connection(network: "Network", ipc: str) -> None:
    endpoint = network.endpoint(ipc, echo)
    client = network.client(ipc)
    await client.call(GetStatus())
    time.sleep(2 * network.limits.silence_s)  # noqa: ASYNC251 - a blocking call is what this is about
    assert (await client.call(GetStatus()))[0] == Done()
    assert endpoint.peers == ["worker-0.1"]  # the server was stopped as well, so it dropped no peer either


async def test_a_cancelled_call_is_forgotten(network: "Network", ipc: str) -> None:
    held: list[Call] = []
    network.endpoint(ipc, held.append)
    client = network.client(ipc)
    call = asyncio.create_task(client.call(GetStatus()))
    await network.until(lambda: held)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    held[0].reply(Done())
    later = asyncio.create_task(client.call(GetStatus()))
    await network.until(lambda: held[-1].id == 2)  # the first call may have been sent again
    held[-1].reply(RelayStatus())
    assert (await later)[0] == RelayStatus()


@pytest.mark.parametrize("header", [[PROTOCOL + 1, 1, ["Done"]], [PROTOCOL + 1, 0, {"of": "the future"}]])
async def test_a_server_of_another_protocol_is_named_with_both_versions(
    network: "Network", ipc: str, header: list[object]
) -> None:
    server = network.router(ipc)
    call = asyncio.create_task(network.client(ipc).call(GetStatus()))
    route = (await server.hear())[0]
    server.zmq.send_multipart([route, msgspec.msgpack.encode(header)])
    with pytest.raises(ConfigError, match=f"protocol of {ipc} is {PROTOCOL + 1}; this client speaks {PROTOCOL}"):
        await call


async def test_what_is_no_message_is_ignored(network: "Network", ipc: str, caplog: pytest.LogCaptureFixture) -> None:
    server = network.router(ipc)
    call = asyncio.create_task(network.client(ipc).call(GetStatus()))
    route = (await server.hear())[0]
    for header in (b"", b"\xff\xff", encode_reply(77, Pong()), encode_reply(1, Done()), encode_reply(1, Done())):
        server.zmq.send_multipart([route, header])
    assert (await call)[0] == Done()
    assert caplog.text.count("sent an unreadable message") == 2


async def test_an_oversize_request_does_not_leave(network: "Network", ipc: str) -> None:
    client = network.client(ipc, limits=replace(network.limits, max_message_bytes=1_000, max_frames=2))
    for frames in ([b"x" * 1_001], [b"x"] * 3):
        with pytest.raises(Refused, match="oversize") as caught:
            await client.call(GetStatus(), frames)
        assert caught.value.code is Code.OVERSIZE


async def test_a_request_with_a_header_beyond_its_limit_does_not_leave(network: "Network", ipc: str) -> None:
    client = network.client(ipc, limits=replace(network.limits, max_header_bytes=10))
    with pytest.raises(Refused, match=r"a header of .* bytes; at most 10"):
        await client.call(GetStatus())


async def test_an_oversize_answer_is_refused(network: "Network", ipc: str) -> None:
    network.endpoint(ipc, lambda call: call.reply(Done(), [b"x"] * 3))
    with pytest.raises(Refused, match="oversize"):
        await network.client(ipc, limits=replace(network.limits, max_frames=2)).call(GetStatus())


async def test_too_many_waiting_calls_are_refused(network: "Network", ipc: str) -> None:
    network.endpoint(ipc, lambda call: None)
    client = network.client(ipc, limits=replace(network.limits, max_pending=2))
    waiting = [asyncio.create_task(client.call(GetStatus())) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(Refused, match="busy: 2 calls"):
        await client.call(GetStatus())
    client.close()
    for call in waiting:
        with pytest.raises(Unavailable):
            await call


async def test_a_closed_client_fails_what_waits_and_takes_nothing_more(network: "Network", ipc: str) -> None:
    client = network.client(ipc)
    call = asyncio.create_task(client.call(GetStatus(), timeout_s=None))
    await asyncio.sleep(0.05)
    client.close()
    client.close()
    with pytest.raises(Unavailable):
        await call
    with pytest.raises(Unavailable, match="closed"):
        await client.call(GetStatus())


async def test_hundreds_of_clients_come_back_after_a_restart(network: "Network", ipc: str) -> None:
    first = network.endpoint(ipc, echo)
    clients = [network.client(ipc, f"worker-{index}.1") for index in range(300)]
    await asyncio.gather(*(client.call(GetStatus()) for client in clients))
    first.close()
    endpoint = await bound_again(network, ipc)
    async with asyncio.timeout(60):
        await asyncio.gather(*(client.call(GetStatus()) for client in clients))
    assert len(endpoint.peers) == 300


@pytest.mark.parametrize("address", ["", "nonsense", "tcp://127.0.0.1", "tcp://127.0.0.1:0", "tcp://*:1", "ipc://s"])
def test_a_client_refuses_what_is_no_address(address: str) -> None:
    with pytest.raises(ConfigError, match="address is"):
        Client(address, worker=WorkerId("worker-0.1"))


def test_a_worker_name_must_fit_into_a_route(ipc: str) -> None:
    with pytest.raises(ConfigError, match="its name must have at most 238 bytes"):
        Client(ipc, worker=WorkerId("w" * 239))


def test_worker_ids_are_unique() -> None:
    ids = {worker_id("rollout-0") for _ in range(100)}
    assert len(ids) == 100
    assert all(id.startswith("rollout-0.") for id in ids)


def test_delays_grow_to_the_cap_and_are_jittered() -> None:
    backoff = Backoff(1.0, 5.0)
    for attempt, most in ((1, 2.0), (2, 4.0), (3, 5.0), (50, 5.0)):
        delays = [backoff.delay_s(attempt) for _ in range(200)]
        assert min(delays) >= 1.0
        assert max(delays) <= most
        assert len(set(delays)) > 100


async def test_a_blocking_client_serves_several_threads(network: "Network", ipc: str) -> None:
    network.endpoint(ipc, echo)

    def work() -> list[bytes]:
        client = BlockingClient(ipc, worker=WorkerId("trainer-0.1"))
        answers: list[bytes] = []

        def ask(index: int) -> None:
            for _ in range(20):
                _, (frame,) = client.call(GetStatus(), [b"%d" % index])
                answers.append(bytes(frame))

        threads = [threading.Thread(target=ask, args=(index,)) for index in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert client.ask(GetStatus(), Done) == Done()
        client.close()
        return answers

    assert sorted(await asyncio.to_thread(work)) == sorted(b"%d" % index for index in range(4) for _ in range(20))


def test_closing_a_blocking_client_fails_what_waits(ipc: str) -> None:
    client = BlockingClient(ipc, worker=WorkerId("trainer-0.1"))
    failures: list[str] = []

    def ask() -> None:
        try:
            client.call(GetStatus(), timeout_s=None)
        except Unavailable as error:
            failures.append(error.address)

    thread = threading.Thread(target=ask)
    thread.start()
    while not client._client._pending:  # pyright: ignore[reportPrivateUsage]
        time.sleep(0.01)
    client.close()
    thread.join(60)
    assert failures == [ipc]
    client.close()
    with pytest.raises(Unavailable, match="closed"):
        client.call(GetStatus())


def test_a_blocking_client_raises_what_the_async_one_does(ipc: str) -> None:
    client = BlockingClient(ipc, worker=WorkerId("trainer-0.1"))
    try:
        with pytest.raises(Unavailable):
            client.ask(GetStatus(), Done, timeout_s=0.1)
    finally:
        client.close()
