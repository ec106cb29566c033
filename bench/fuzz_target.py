"""The common part of all fuzzed servers: a message arrives as from an endpoint, and the reply is decoded.

The property under test: any bytes give a message, a ``ProtocolError`` or a refusal and nothing else; a refused
message changes no state; the reader of every reply can decode it.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Protocol

from bench.fuzz_messages import Raw, Said
from staleflow.net.endpoint import Call
from staleflow.net.memory_transport import MemoryEndpoint
from staleflow.protocols.wire.codec import ProtocolError, decode_reply, decode_request, encode_reply
from staleflow.protocols.wire.messages import BeginPublish, PutStageResults, Refusal, Reply, Request, Results

UNREADABLE = "unreadable"
WAITS = "waits"


class Finding(Exception):
    """The property is violated. The text of the exception shows how to reproduce it."""


class Target(Protocol):
    """A server in this process."""

    def seeds(self) -> Sequence[Said]:
        """Messages that are valid now."""
        ...

    def offer(self, raw: Raw) -> str:
        """Deliver a message; return its outcome in a few words. Any exception is a finding."""
        ...

    async def settle(self) -> None:
        """Finish all work under way, and check the invariants that must hold then."""
        ...

    async def close(self) -> None:
        """Stop the server; check the invariants that must hold at the end."""
        ...


class Ears:
    """Sends messages to a server, and reads its immediate replies."""

    def __init__(self, on_call: Callable[[Call], None]) -> None:
        self._endpoint = MemoryEndpoint(on_call, lambda deliver: deliver())

    def say(
        self,
        peer: str,
        body: Request,
        frames: Sequence[bytes] = (),
        *,
        then: Callable[[], None],
        late: Callable[[Reply], None] | None = None,
    ) -> Reply | None:
        """The reply that has arrived once ``then`` has run, or None while the call waits. ``late`` receives
        every reply, whenever it arrives."""
        received: list[Reply] = []

        def on_reply(reply: Reply) -> None:
            if decode_reply(encode_reply(7, reply))[0] != 7:
                raise Finding(f"{reply} does not come back as it was sent")
            received.append(reply)
            if late is not None:
                late(reply)

        self._endpoint.call(peer, body, on_reply, [memoryview(frame) for frame in frames])
        then()
        return received[0] if received else None


def read(raw: Raw) -> Request | None:
    """The message, or None for bytes that are not a message; any other outcome is a finding."""
    try:
        return decode_request(raw.header)[1]
    except ProtocolError as error:
        decode_reply(encode_reply(error.id, Refusal(code=error.code, detail=error.detail)))
        return None


def is_no(reply: Reply | None) -> bool:
    """Check that no part of the request had an effect."""
    if isinstance(reply, Results):
        return all(result.code is not None for result in reply.results)
    return isinstance(reply, Refusal)


def must_be_unchanged(body: Request, reply: Reply | None, before: Hashable, after: Hashable) -> None:
    """Check that a refusal changes no state. Exceptions: a stage that sends an invalid result has given its group up,
    and a trainer that begins another version has given up the one it was writing, even if it has to wait for room."""
    if before != after and is_no(reply) and not isinstance(body, PutStageResults | BeginPublish):
        raise Finding(f"{type(body).__name__} was refused, {reply}, and yet changed the state")


def signature(body: Request, reply: Reply | None) -> str:
    """Outcome of a message, as a key that distinguishes new behaviour from known behaviour."""
    match reply:
        case None:
            return f"{type(body).__name__} {WAITS}"
        case Refusal():
            words = " ".join(word for word in reply.detail.split()[:4] if word.isalpha())
            return f"{type(body).__name__} {reply.code} {words}"
        case Results():
            codes = sorted({str(result.code or "done") for result in reply.results})
            return f"{type(body).__name__} {' '.join(codes)}"
        case _:
            return f"{type(body).__name__} {type(reply).__name__}"
