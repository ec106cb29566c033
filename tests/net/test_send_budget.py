"""The bytes queued for a peer that does not read are bounded, and other peers do not pay for them."""

import asyncio
from dataclasses import dataclass

import zmq

from staleflow.net.client import Client
from staleflow.net.endpoint import Call, Endpoint
from staleflow.net.limits import TransportLimits
from staleflow.net.zmq_stream import SendBudget, context
from staleflow.protocols.consistency.ids import Lineage, Version, WorkerId
from staleflow.protocols.wire.codec import encode_request
from staleflow.protocols.wire.messages import Chunk, GetChunk

MIB = 1 << 20


@dataclass
class Frame:
    done: bool = False


def test_a_peer_gets_no_more_until_it_has_taken_some_and_others_are_not_asked() -> None:
    unread, first, second = SendBudget(10, 100), Frame(), Frame()
    assert unread.has_room(b"a", 50), "one answer is always sent, however large"
    unread.sent(b"a", first, 6)
    unread.sent(b"a", second, 4)
    assert not unread.has_room(b"a", 1)
    assert unread.has_room(b"b", 10)
    first.done = True
    assert unread.has_room(b"a", 6)
    assert not unread.has_room(b"a", 7)


def test_when_all_hold_too_much_only_who_has_taken_everything_gets_an_answer() -> None:
    unread = SendBudget(10, 15)
    for route in (b"a", b"b", b"c"):
        assert unread.has_room(route, 5)
        unread.sent(route, Frame(), 5)
    assert not unread.has_room(b"a", 1)
    assert unread.has_room(b"d", 5)


def test_peers_that_have_gone_leave_nothing() -> None:
    unread, frame = SendBudget(10, 100), Frame()
    unread.sent(b"gone", frame, 6)
    frame.done = True
    unread.sent(b"there", Frame(), 5)
    assert unread.nbytes == 5


async def test_a_reader_that_takes_nothing_holds_little_and_the_next_one_is_answered() -> None:
    given, most, all_asked = bytes(MIB), 8 * MIB, asyncio.Event()

    def give(call: Call) -> None:
        call.reply(Chunk(offset=0), [given])
        if endpoint.counts.calls == 200:
            all_asked.set()

    endpoint = Endpoint("tcp://127.0.0.1:*", on_call=give, limits=TransportLimits(max_unread_bytes=most))
    serving = asyncio.ensure_future(endpoint.serve())
    greedy = context().socket(zmq.DEALER)
    greedy.setsockopt(zmq.ROUTING_ID, b"greedy.1/0123456789abcdef")
    greedy.setsockopt(zmq.RCVHWM, 1)
    greedy.setsockopt(zmq.LINGER, 0)
    greedy.connect(endpoint.address)
    honest = Client(endpoint.address, worker=WorkerId("honest.1"))
    ask = GetChunk(lineage=Lineage(0), version=Version(0), offset=0, nbytes=MIB)
    try:
        for number in range(1, 201):
            greedy.send(encode_request(number, ask))
        await asyncio.wait_for(all_asked.wait(), 60)
        assert endpoint.counts.undelivered > 100, "what is dropped is asked for again by whoever reads"
        _, frames = await honest.call(ask, timeout_s=60.0)
        assert frames[0].nbytes == MIB
    finally:
        greedy.close()
        honest.close()
        endpoint.close()
        await serving
