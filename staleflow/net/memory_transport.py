"""Transport without sockets: requests go straight to one server, replies return as callbacks.

The owner schedules each reply (``later``), so neither side is ever called from inside the other.
"""

import asyncio
from collections.abc import Callable, Sequence

from staleflow.net.client import MIN_BUSY_S, Answer, Client
from staleflow.net.endpoint import Call, Peer
from staleflow.net.errors import Refused, Unavailable
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.consistency.ids import WorkerId
from staleflow.protocols.wire.codec import Data
from staleflow.protocols.wire.messages import Refusal, Reply, Request

OnReply = Callable[[Reply], None]
OnAnswer = Callable[[Reply, Sequence[Data]], None]


class MemoryEndpoint:
    """An ``Endpoint`` to its server and a ``Client`` to everything else."""

    def __init__(self, on_call: Callable[[Call], None], later: Callable[[Callable[[], None]], None]) -> None:
        self._on_call = on_call
        self._later = later
        self._peers: dict[str, Peer] = {}
        self._waiting: dict[int, OnAnswer] = {}
        self._last_id = 0
        self.requested = False
        """True if a request arrived since the owner last set this to False."""

    @property
    def peers(self) -> list[str]:
        """Names of the connected peers."""
        return list(self._peers)

    def call(self, name: str, body: Request, on_reply: OnReply, frames: Sequence[memoryview] = ()) -> None:
        """Send a request as ``name``; pass the reply to ``on_reply`` unless ``name`` has left by then."""
        self.request(name, body, lambda reply, _: on_reply(reply), frames)

    def request(self, name: str, body: Request, on_answer: OnAnswer, frames: Sequence[Data] = ()) -> None:
        """Like ``call``, for a reply with frames."""
        peer = self._peers.get(name)
        if peer is None:
            peer = self._peers[name] = Peer(name.encode(), 0.0, [])
        self._last_id += 1
        call = peer.pending[self._last_id] = Call(self, peer, self._last_id, body, [memoryview(f) for f in frames])
        self._waiting[call.id] = on_answer
        self.requested = True
        self._on_call(call)

    def answer(self, peer: Peer, id: int, body: Reply, frames: Sequence[Data]) -> None:
        """Send the reply of a call. Called by ``Call.reply``."""
        peer.pending.pop(id, None)
        on_answer = self._waiting.pop(id, None)
        if on_answer is not None and not peer.gone:
            self._later(lambda: None if peer.gone else on_answer(body, frames))

    def leave(self, name: str) -> None:
        """Disconnect ``name``: its calls end without a reply."""
        peer = self._peers.pop(name, None)
        if peer is not None:
            peer.gone = True
            for id in peer.pending:
                self._waiting.pop(id, None)
            peer.pending.clear()


class MemoryClient(Client):
    """A ``Client`` of a ``MemoryEndpoint``: the same calls and errors, without a socket, a codec or a heartbeat."""

    def __init__(self, endpoint: MemoryEndpoint, *, worker: WorkerId) -> None:
        self.address = "memory"
        self._endpoint = endpoint
        self._worker = worker

    async def call(self, body: Request, frames: Sequence[Data] = (), *, timeout_s: float | None = 30.0) -> Answer:
        clock, busy_s = asyncio.get_running_loop().time, None
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    reply, answer_frames = await self._once(body, frames)
                    if type(reply) is not Refusal:
                        return reply, answer_frames
                    busy_s = clock() if busy_s is None or not reply.retry_for_ms else busy_s
                    final = reply.retry_for_ms and clock() - busy_s >= reply.retry_for_ms / 1_000
                    if reply.code is not Code.BUSY or final:
                        raise Refused(reply.code, reply.detail)
                    await asyncio.sleep(max(reply.retry_after_ms / 1_000, MIN_BUSY_S))
        except TimeoutError:
            raise Unavailable(self.address, timeout_s or 0.0, "") from None

    async def _once(self, body: Request, frames: Sequence[Data]) -> Answer:
        answered: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()

        def on_answer(reply: Reply, answer_frames: Sequence[Data]) -> None:
            if not answered.done():
                answered.set_result((reply, [memoryview(frame) for frame in answer_frames]))

        self._endpoint.request(self._worker, body, on_answer, frames)
        return await answered

    def close(self) -> None:
        """Do nothing: no connection is open."""
