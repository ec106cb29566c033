"""The transport without sockets replies later, never from inside the call, and not at all once a peer has left."""

import asyncio
from collections.abc import Callable

import pytest

from staleflow.net.endpoint import Call
from staleflow.net.errors import Refused, Unavailable
from staleflow.net.memory_transport import MemoryClient, MemoryEndpoint
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.consistency.ids import WorkerId
from staleflow.protocols.wire.codec import ProtocolError
from staleflow.protocols.wire.messages import Done, Ping, Pong, Refusal, Reply


class Server:
    """Server that keeps the calls it receives; ``deliver`` is a turn of its owner."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.endpoint = MemoryEndpoint(self.calls.append, lambda answer: self._later.append(answer))
        self.heard: list[Reply] = []
        self._later: list[object] = []

    def ask(self, name: str) -> Call:
        self.endpoint.call(name, Ping(), self.heard.append)
        return self.calls[-1]

    def deliver(self) -> list[Reply]:
        later, self._later = self._later, []
        for answer in later:
            assert callable(answer)
            answer()
        return self.heard


def test_an_answer_comes_when_the_owner_says() -> None:
    server = Server()
    call = server.ask("rollout-0")
    assert (call.peer, call.done, server.endpoint.requested) == ("rollout-0", False, True)
    call.reply(Done())
    assert (call.done, server.heard) == (True, [])
    assert server.deliver() == [Done()]


def test_who_has_left_is_not_answered_and_its_calls_are_done() -> None:
    server = Server()
    answered, pending = server.ask("rollout-0"), server.ask("rollout-0")
    answered.reply(Done())
    server.endpoint.leave("rollout-0")
    pending.reply(Done())
    assert (pending.done, server.deliver(), server.endpoint.peers) == (True, [], [])


def test_who_comes_back_under_its_name_is_another_peer() -> None:
    server = Server()
    old = server.ask("rollout-0")
    server.endpoint.leave("rollout-0")
    new = server.ask("rollout-0")
    assert (old.done, new.done) == (True, False)
    new.reply(Done())
    assert server.deliver() == [Done()]


def client(on_call: Callable[[Call], None]) -> MemoryClient:
    """Create a client whose server is ``on_call``; requires a running loop."""
    loop = asyncio.get_running_loop()

    def later(deliver: Callable[[], None]) -> None:
        loop.call_soon(deliver)

    return MemoryClient(MemoryEndpoint(on_call, later), worker=WorkerId("rollout-0.1"))


async def test_a_client_gets_the_reply_and_its_frames() -> None:
    calls: list[Call] = []

    def answer(call: Call) -> None:
        calls.append(call)
        call.reply(Pong(), [b"one", b"two"])

    reply, frames = await client(answer).call(Ping(), [memoryview(b"sent")])
    assert (reply, list(map(bytes, frames))) == (Pong(), [b"one", b"two"])
    assert [(call.peer, list(map(bytes, call.frames))) for call in calls] == [("rollout-0.1", [b"sent"])]


async def test_a_client_is_refused_and_rejects_a_reply_of_another_type() -> None:
    with pytest.raises(Refused, match="not here"):
        await client(lambda call: call.refuse(Code.DENIED, "not here")).ask(Ping(), Pong)
    with pytest.raises(ProtocolError, match="answered Ping with Done, not Pong"):
        await client(lambda call: call.reply(Done())).ask(Ping(), Pong)


async def test_a_busy_server_is_asked_again_until_it_answers() -> None:
    left = [3]

    def busy(call: Call) -> None:
        left[0] -= 1
        call.refuse(Code.BUSY, "full") if left[0] else call.reply(Pong())

    assert await client(busy).ask(Ping(), Pong) == Pong()
    assert left == [0]


async def test_a_server_that_is_busy_for_a_limited_time_has_refused_after_it() -> None:
    calls: list[Call] = []

    def busy(call: Call) -> None:
        calls.append(call)
        call.reply(Refusal(code=Code.BUSY, detail="full", retry_after_ms=10, retry_for_ms=25))

    with pytest.raises(Refused, match="full"):
        await client(busy).ask(Ping(), Pong)
    assert len(calls) > 1


async def test_a_server_that_does_not_answer_in_time_is_unavailable() -> None:
    with pytest.raises(Unavailable, match=r"no answer from memory for 0\.1 s"):
        await client(lambda call: None).ask(Ping(), Pong, timeout_s=0.1)
