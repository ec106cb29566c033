"""The server side works with real clients and withstands raw sockets."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec
import pytest
import zmq

from staleflow.net.endpoint import Call, Endpoint
from staleflow.net.limits import TransportLimits
from staleflow.net.transport import Link, OnMessage, Sockets
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.wire.codec import encode_request
from staleflow.protocols.wire.messages import PROTOCOL, Done, Drain, GetStatus, Ping, Pong, Refusal, RelayStatus

if TYPE_CHECKING:
    from tests.net.conftest import Network

STATUS = encode_request(1, GetStatus())


def stand_still(seconds: float) -> None:
    """Block the event loop, as SIGSTOP does."""
    time.sleep(seconds)


def echo(call: Call) -> None:
    call.reply(Done(), call.frames)


@pytest.mark.parametrize("bind", ["ipc", "tcp://127.0.0.1:0", "tcp://localhost:0", "tcp://[::1]:*"])
async def test_a_call_is_answered_with_its_frames(network: "Network", ipc: str, bind: str) -> None:
    endpoint = network.endpoint(ipc if bind == "ipc" else bind, echo)
    client = network.client(endpoint.address)
    sent = [b"", b"small", b"x" * 1_000_000]
    reply, frames = await client.call(GetStatus(), sent)
    assert reply == Done()
    assert [bytes(frame) for frame in frames] == sent
    assert endpoint.peers == ["worker-0.1"]


async def test_a_call_tells_who_asks_and_may_be_answered_later(network: "Network", ipc: str) -> None:
    held: list[Call] = []
    network.endpoint(ipc, held.append)
    answers = [asyncio.create_task(network.client(ipc, name).call(GetStatus())) for name in ("a.1", "b.2")]
    await network.until(lambda: len(held) >= 2)
    for call in reversed(held):
        assert not call.done
        call.reply(RelayStatus(parent=call.peer))
        assert call.done
    assert [(await answer)[0] for answer in answers] == [
        RelayStatus(parent="a.1"),
        RelayStatus(parent="b.2"),
    ]


async def test_a_call_cannot_be_answered_twice(network: "Network", ipc: str) -> None:
    calls: list[Call] = []

    def answer(call: Call) -> None:
        calls.append(call)
        call.reply(Done())

    network.endpoint(ipc, answer)
    await network.client(ipc).call(GetStatus())
    with pytest.raises(RuntimeError, match=r"call 1 of worker-0\.1 got a second reply"):
        calls[0].reply(Done())


async def test_a_retry_of_a_pending_call_runs_once_and_of_an_answered_one_again(network: "Network", ipc: str) -> None:
    held: list[Call] = []
    endpoint = network.endpoint(ipc, held.append)
    peer = network.dealer(ipc)
    for _ in range(3):
        peer.zmq.send(STATUS)
    await network.until(lambda: endpoint.counts.repeated >= 2)
    assert len(held) == 1
    held[0].reply(Done())
    await peer.hear()
    peer.zmq.send(STATUS)
    await network.until(lambda: len(held) >= 2)
    assert (endpoint.counts.calls, endpoint.counts.replies) == (2, 1)


class Watched(Sockets):
    """Record the route of each message that an endpoint receives."""

    def __init__(self) -> None:
        super().__init__()
        self.routes: list[bytes] = []

    def bind(
        self, address: str, *, limits: TransportLimits, on_message: OnMessage, on_drained: Callable[[], None] | None
    ) -> tuple[Link, str]:
        def noted(head: list[bytes], frames: list[memoryview], oversize: bool) -> None:
            self.routes.append(head[0])
            on_message(head, frames, oversize)

        return super().bind(address, limits=limits, on_message=noted, on_drained=on_drained)


async def test_what_a_replaced_connection_left_unread_does_not_run_as_anothers(network: "Network", ipc: str) -> None:
    """ZeroMQ renames the older of two connections with one name, and then delivers its unread messages."""
    callers: set[str] = set()
    watched = Watched()
    endpoint = Endpoint(ipc, on_call=lambda call: callers.add(call.peer), transport=watched)
    network.endpoints.append(endpoint)
    network.tasks.append(asyncio.create_task(endpoint.serve()))
    async with asyncio.timeout(60):
        while not any(route.startswith(b"\0") for route in watched.routes):
            for _ in range(2):  # the loop is blocked, so nothing is read meanwhile
                peer = network.dealer(ipc, b"worker.1/0")
                for id in range(1, 101):
                    peer.zmq.send(encode_request(id, GetStatus()))
                peer.zmq.close(5_000)
            await asyncio.sleep(0.01)
    assert b"worker.1/0" in watched.routes
    assert callers == {"worker.1"}
    assert endpoint.peers == ["worker.1"]
    assert endpoint.counts.nameless == sum(route.startswith(b"\0") for route in watched.routes)


async def test_replies_held_until_the_drain_leave_together(network: "Network", ipc: str) -> None:
    held: list[Call] = []
    groups: list[int] = []

    def commit() -> None:
        groups.append(len(held))
        for call in held:
            call.reply(Done())
        held.clear()

    limits = TransportLimits(heartbeat_s=60, retry_s=20, retry_cap_s=20)  # every message is a call
    network.endpoint(ipc, held.append, on_drained=commit, limits=limits)
    client = network.client(ipc, limits=limits)
    await client.call(GetStatus())
    await asyncio.gather(*(client.call(GetStatus()) for _ in range(500)))
    assert sum(groups) == 501
    assert 0 not in groups
    assert len(groups) < 400  # far fewer commits than calls


async def test_a_ping_is_answered_by_the_transport(network: "Network", ipc: str) -> None:
    endpoint = network.endpoint(ipc, echo)
    assert await network.dealer(ipc).ask(encode_request(9, Ping())) == (9, Pong())
    assert (endpoint.counts.pings, endpoint.counts.calls) == (1, 0)


async def test_a_silent_peer_is_gone_and_its_calls_are_done(network: "Network", ipc: str) -> None:
    held: list[Call] = []
    gone: list[str] = []
    endpoint = network.endpoint(ipc, held.append, on_gone=gone.append)
    alive = asyncio.create_task(network.client(ipc, "alive.1").call(GetStatus()))
    network.dealer(ipc, b"silent.1/0").zmq.send(STATUS)
    await network.until(lambda: gone)
    assert gone == ["silent.1"]
    assert endpoint.peers == ["alive.1"]
    done = {call.peer: call.done for call in held}
    assert done == {"silent.1": True, "alive.1": False}
    for call in held:
        call.reply(Done())  # no effect on the silent one
    assert (await alive)[0] == Done()
    assert endpoint.counts.replies == 1


async def test_a_pause_of_the_server_counts_against_no_peer(network: "Network", ipc: str) -> None:
    gone: list[str] = []
    endpoint = network.endpoint(ipc, echo, on_gone=gone.append)
    network.dealer(ipc, b"patient.1/0").zmq.send(STATUS)
    await network.until(lambda: endpoint.peers)
    stand_still(2 * network.limits.silence_s)
    await asyncio.sleep(1.5 * network.limits.heartbeat_s)  # two sweeps later its silence limit has not passed yet
    assert gone == []
    await network.until(lambda: gone)


async def test_a_worker_with_two_connections_is_gone_with_the_last(network: "Network", ipc: str) -> None:
    gone: list[str] = []
    endpoint = network.endpoint(ipc, echo, on_gone=gone.append)
    network.dealer(ipc, b"worker.1/0").zmq.send(STATUS)
    await network.until(lambda: endpoint.peers)
    client = network.client(ipc, "worker.1")
    await client.call(GetStatus())
    assert endpoint.peers == ["worker.1", "worker.1"]
    await network.until(lambda: endpoint.peers == ["worker.1"])
    assert gone == []
    client.close()
    await network.until(lambda: gone)
    assert gone == ["worker.1"]


async def test_an_answer_to_a_vanished_peer_is_dropped(network: "Network", ipc: str) -> None:
    held: list[Call] = []
    endpoint = network.endpoint(ipc, held.append, limits=replace(network.limits, heartbeat_s=60))  # it counts as alive
    peer = network.dealer(ipc)
    peer.zmq.send(STATUS)
    await network.until(lambda: held)
    peer.zmq.close(0)
    async with asyncio.timeout(60):
        while not endpoint.counts.undelivered:  # until the system reports that the connection is closed
            held[0].answered = False
            held[0].reply(Done(), [b"x" * 100_000])
            await asyncio.sleep(0.01)


async def test_a_burst_of_ten_thousand_messages_loses_none(network: "Network", ipc: str) -> None:
    endpoint = network.endpoint(ipc, echo)
    peer = network.dealer(ipc)

    def burst() -> list[int]:
        for id in range(1, 10_001):
            peer.zmq.send(encode_request(id, GetStatus()))
        return [msgspec.msgpack.decode(peer.zmq.recv())[1] for _ in range(10_000)]

    assert await asyncio.to_thread(burst) == list(range(1, 10_001))
    assert (endpoint.counts.calls, endpoint.counts.undelivered) == (10_000, 0)


async def test_timers_run_during_a_flood(network: "Network", ipc: str) -> None:
    endpoint = network.endpoint(ipc, echo, limits=replace(network.limits, burst_messages=16))
    peer = network.dealer(ipc)

    def flood() -> None:
        for id in range(1, 20_001):
            peer.zmq.send(encode_request(id, GetStatus()))

    flooding = asyncio.create_task(asyncio.to_thread(flood))
    seen: set[int] = set()
    while endpoint.counts.calls < 20_000:
        await asyncio.sleep(0)
        seen.add(endpoint.counts.calls)
    await flooding
    assert len(seen) > 20_000 / 16 / 10


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param([b""], id="empty"),
        pytest.param([b"", b"", b""], id="empty frames"),
        pytest.param([b"GET / HTTP/1.1"], id="text"),
        pytest.param([b"\xdd\xff\xff\xff\xff"], id="four billion elements"),
        pytest.param([b"\x91" * 50_000], id="deep"),
        pytest.param([msgspec.msgpack.encode([PROTOCOL, 5, ["Unheard"]]), b"x" * 100_000], id="unknown, with a frame"),
    ],
)
async def test_a_malformed_message_is_refused_and_others_go_on(
    network: "Network", ipc: str, parts: list[bytes]
) -> None:
    endpoint = network.endpoint(ipc, echo)
    hostile = network.dealer(ipc)
    _, reply = await hostile.ask(*parts)
    assert isinstance(reply, Refusal)
    assert reply.code is Code.MALFORMED
    assert endpoint.counts.malformed == 1
    assert endpoint.peers == []  # a connection without a valid message is no peer
    assert (await network.client(ipc).call(GetStatus()))[0] == Done()


async def test_what_is_rejected_is_reported_with_its_sender(network: "Network", ipc: str) -> None:
    rejected: list[tuple[str, Code]] = []
    network.endpoint(ipc, echo, on_reject=lambda peer, code, detail: rejected.append((peer, code)))
    await network.dealer(ipc, b"rollout-0.1/c").ask(b"nonsense")
    await network.dealer(ipc, b"\xff").ask(b"nonsense")
    assert rejected == [("rollout-0.1", Code.MALFORMED), ("\\xff", Code.MALFORMED)]


async def test_another_protocol_version_is_told_both(network: "Network", ipc: str) -> None:
    network.endpoint(ipc, echo)
    id, reply = await network.dealer(ipc).ask(msgspec.msgpack.encode([PROTOCOL + 1, 5, ["Ping"], "new"]))
    assert id == 5
    assert isinstance(reply, Refusal)
    assert reply.detail == f"the peer speaks protocol {PROTOCOL + 1}, this side speaks {PROTOCOL}"


@pytest.mark.parametrize(
    "frames", [pytest.param([b""] * 9, id="too many frames"), pytest.param([b"x" * 600] * 2, id="too many bytes")]
)
async def test_an_oversize_message_is_refused_with_its_id(network: "Network", ipc: str, frames: list[bytes]) -> None:
    endpoint = network.endpoint(ipc, echo, limits=replace(network.limits, max_frames=8, max_message_bytes=1_000))
    id, reply = await network.dealer(ipc).ask(encode_request(7, GetStatus()), *frames)
    assert id == 7
    assert reply == Refusal(code=Code.OVERSIZE, detail="a message has at most 1000 bytes in 8 frames")
    assert (endpoint.counts.oversize, endpoint.counts.calls) == (1, 0)


async def test_a_header_beyond_its_limit_is_refused_unread_with_its_id(network: "Network", ipc: str) -> None:
    endpoint = network.endpoint(ipc, echo, limits=replace(network.limits, max_header_bytes=1_000))
    nobody = msgspec.msgpack.encode([PROTOCOL, 7, ["no such verb", [0] * 1_000]])
    id, reply = await network.dealer(ipc).ask(nobody)
    assert id == 7
    detail = f"a header of {len(nobody)} bytes; at most 1000"
    assert reply == Refusal(code=Code.OVERSIZE, detail=detail)
    assert (endpoint.counts.oversize, endpoint.counts.malformed, endpoint.counts.calls) == (1, 0, 0)


async def test_a_frame_beyond_the_limit_ends_only_its_own_connection(network: "Network", ipc: str) -> None:
    network.endpoint(ipc, echo, limits=replace(network.limits, max_message_bytes=10_000))
    client = network.client(ipc)
    await client.call(GetStatus())
    hostile = network.dealer(ipc)
    hostile.zmq.set(zmq.RCVTIMEO, 300)
    hostile.zmq.send_multipart([STATUS, b"x" * 20_000])
    with pytest.raises(zmq.Again):
        await hostile.hear()
    assert (await client.call(GetStatus()))[0] == Done()


async def test_the_bytes_of_calls_that_wait_are_bounded(network: "Network", ipc: str) -> None:
    held: list[Call] = []
    endpoint = network.endpoint(ipc, held.append, limits=replace(network.limits, max_held_bytes=2_500))
    peers = [network.dealer(ipc, f"w-{number}/1".encode()) for number in range(3)]
    for peer in peers:
        peer.zmq.send_multipart([STATUS, bytes(1_000)])
    await network.until(lambda: len(held) == 2 and endpoint.counts.busy == 1)
    held[0].reply(Done())
    for peer in peers:  # the answered one, the waiting one, and the one that was rejected with BUSY
        peer.zmq.send_multipart([STATUS, bytes(1_000)])
    await network.until(lambda: len(held) == 3 and endpoint.counts.busy == 2 and endpoint.counts.repeated == 1)
    for peer in peers:
        peer.zmq.close(0)
    await network.until(lambda: endpoint.peers == [])  # a disconnected peer holds nothing
    again = network.dealer(ipc, b"w-4/1")
    again.zmq.send_multipart([STATUS, bytes(2_400)])
    await network.until(lambda: len(held) == 4)


async def test_too_many_pending_calls_of_one_peer_are_refused_busy(network: "Network", ipc: str) -> None:
    held: list[Call] = []
    endpoint = network.endpoint(ipc, held.append, limits=replace(network.limits, max_pending=3))
    peer = network.dealer(ipc)
    for id in range(1, 6):
        peer.zmq.send(encode_request(id, GetStatus()))
    for id in (4, 5):
        header = (await peer.hear())[0]
        assert msgspec.msgpack.decode(header)[1:] == [
            id,
            ["Refusal", "busy", "3 calls of this peer are pending; retry later", 1_000, 0],
        ]
    assert (len(held), endpoint.counts.busy) == (3, 2)
    network.dealer(ipc).zmq.send(STATUS)  # another peer is not affected
    await network.until(lambda: len(held) >= 4)


async def test_too_many_peers_are_refused_busy(network: "Network", ipc: str) -> None:
    endpoint = network.endpoint(ipc, echo, limits=replace(network.limits, max_peers=2, heartbeat_s=60))
    replies = [await network.dealer(ipc).ask(STATUS) for _ in range(3)]
    assert [type(reply) for _, reply in replies] == [Done, Done, Refusal]
    assert endpoint.counts.busy == 1


async def test_what_was_answered_before_the_close_still_leaves(network: "Network", ipc: str) -> None:
    def answer_and_close(call: Call) -> None:
        call.reply(Done(), [b"x" * 5_000_000])
        endpoint.close()

    endpoint = network.endpoint(ipc, answer_and_close, limits=replace(network.limits, linger_ms=10_000))
    client = network.client(ipc, limits=replace(network.limits, heartbeat_s=60))  # it keeps its connection
    reply, (frame,) = await client.call(Drain(why="test"))
    assert reply == Done()
    assert len(frame) == 5_000_000
    await network.tasks[0]


async def test_closing_twice_or_before_serving_is_harmless(network: "Network", ipc: str) -> None:
    endpoint = network.endpoint(ipc, echo)
    endpoint.close()
    endpoint.close()
    await endpoint.serve()
