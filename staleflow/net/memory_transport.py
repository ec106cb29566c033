"""The transport without sockets: requests go straight to one server, answers come back as callbacks.

The owner says when an answer is delivered (``later``), so that neither side is ever called from inside the other.
"""

from collections.abc import Callable, Sequence

from staleflow.net.endpoint import Call, Peer
from staleflow.protocols.wire.codec import Data
from staleflow.protocols.wire.messages import Reply, Request

OnReply = Callable[[Reply], None]


class MemoryEndpoint:
    """What an ``Endpoint`` is to its server, and what a ``Client`` is to everybody else."""

    def __init__(self, on_call: Callable[[Call], None], later: Callable[[Callable[[], None]], None]) -> None:
        self._on_call = on_call
        self._later = later
        self._peers: dict[str, Peer] = {}
        self._waiting: dict[int, OnReply] = {}
        self._last_id = 0
        self.asked = False
        """A request came since the owner last set this to False."""

    @property
    def peers(self) -> list[str]:
        """Who is there, by name."""
        return list(self._peers)

    def call(self, name: str, body: Request, on_reply: OnReply, frames: Sequence[memoryview] = ()) -> None:
        """``name`` asks; its answer goes to ``on_reply``, unless ``name`` is gone by then."""
        peer = self._peers.get(name)
        if peer is None:
            peer = self._peers[name] = Peer(name.encode(), 0.0, [])
        self._last_id += 1
        call = peer.pending[self._last_id] = Call(self, peer, self._last_id, body, list(frames))
        self._waiting[call.id] = on_reply
        self.asked = True
        self._on_call(call)

    def answer(self, peer: Peer, id: int, body: Reply, frames: Sequence[Data]) -> None:
        """For its calls: they are answered through ``Call.reply``."""
        peer.pending.pop(id, None)
        on_reply = self._waiting.pop(id, None)
        if on_reply is not None and not peer.gone:
            self._later(lambda: None if peer.gone else on_reply(body))

    def leave(self, name: str) -> None:
        """``name`` is heard no more: its calls are done, unanswered."""
        peer = self._peers.pop(name, None)
        if peer is not None:
            peer.gone = True
            for id in peer.pending:
                self._waiting.pop(id, None)
            peer.pending.clear()
