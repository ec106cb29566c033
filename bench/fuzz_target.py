"""What every fuzzed server has in common: a message reaches it as an endpoint brings it, and what it says is read.

The sentence that is checked: any bytes give either a message or a ``ProtocolError`` or a refusal, never anything else;
what was refused changed nothing; every answer is one that its reader can decode.
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
    """The sentence does not hold. The message says how to see it again."""


class Target(Protocol):
    """A server in this process."""

    def seeds(self) -> Sequence[Said]:
        """Messages that make sense now."""
        ...

    def offer(self, raw: Raw) -> str:
        """Bring a message; what became of it, in a few words. Any exception is a finding."""
        ...

    async def settle(self) -> None:
        """Let what is under way come to its end, and check what must hold then."""
        ...

    async def close(self) -> None:
        """End it; check what must hold at the end."""
        ...


class Ears:
    """Says something to a server, and hears what it answers at once."""

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
        """The answer that is there when ``then`` has run, or None while the call waits. ``late`` gets it whenever."""
        heard: list[Reply] = []

        def on_reply(reply: Reply) -> None:
            if decode_reply(encode_reply(7, reply))[0] != 7:
                raise Finding(f"{reply} does not come back as it was sent")
            heard.append(reply)
            if late is not None:
                late(reply)

        self._endpoint.call(peer, body, on_reply, [memoryview(frame) for frame in frames])
        then()
        return heard[0] if heard else None


def read(raw: Raw) -> Request | None:
    """The message, or None for bytes that are none; anything else is a finding."""
    try:
        return decode_request(raw.header)[1]
    except ProtocolError as error:
        decode_reply(encode_reply(error.id, Refusal(code=error.code, detail=error.detail)))
        return None


def is_no(reply: Reply | None) -> bool:
    """Nothing of the request had an effect."""
    if isinstance(reply, Results):
        return all(result.code is not None for result in reply.results)
    return isinstance(reply, Refusal)


def must_be_unchanged(body: Request, reply: Reply | None, before: Hashable, after: Hashable) -> None:
    """A refusal changes nothing; but a stage that answers nonsense has given its group up, and a trainer that begins
    another version has given up the one it was writing, even if it has to wait for room."""
    if before != after and is_no(reply) and not isinstance(body, PutStageResults | BeginPublish):
        raise Finding(f"{type(body).__name__} was refused, {reply}, and yet changed the state")


def signature(body: Request, reply: Reply | None) -> str:
    """What became of a message, so that one that behaves like no other before can be told."""
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
