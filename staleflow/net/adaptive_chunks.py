"""Adapt the size of requests and messages to what a connection carries, learned from how long replies take.

A message in flight delays everything behind it, heartbeats included. So the size starts small, doubles when the reply
to a request of about the current size is fast, and halves when it is slow.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from staleflow.net.client import Client
from staleflow.net.errors import Unavailable
from staleflow.protocols.wire.messages import Ping, Pong

MIN_BYTES = 64 << 10
FIRST_BYTES = 256 << 10
QUICK_S = 0.25
"""A reply within this time allows twice the size. Longer than a round trip around the world."""
LATE_S = 0.5
"""A reply that takes longer is too large. Well below the time after which a client retries."""
PONG_S = 1.4
"""Timeout of the ping that is sent after ``LATE_S``; without a pong the connection is stuck. ``LATE_S + PONG_S`` is
less than the client needs to replace the connection, after which the ping would succeed."""

T = TypeVar("T")


class Stuck(Exception):
    """The connection did not carry the message. Retry with smaller chunks."""


class AdaptiveChunk:
    """Adaptive size of one request over one connection. Belongs to one event loop; keep it as long as the
    connection."""

    def __init__(self, max_bytes: int) -> None:
        self._min_bytes = min(MIN_BYTES, max_bytes)
        self._max_bytes = max_bytes
        self.nbytes = min(FIRST_BYTES, max_bytes)
        """Size of the next message, together with its reply."""

    async def carry(self, client: Client, call: Coroutine[Any, Any, T], nbytes: int, *, divisible: bool = True) -> T:
        """Return the result of a call of ``client`` that moves ``nbytes`` over its connection, and adapt the size.

        Raise ``Stuck`` when the request could be smaller and the connection does not even return a pong. Keep waiting
        for a server that has no reply yet.
        """
        clock = asyncio.get_running_loop().time
        started = clock()
        result = await self.watch(client, call, nbytes, divisible=divisible)
        self.took(nbytes, clock() - started)
        return result

    async def watch(self, client: Client, call: Coroutine[Any, Any, T], nbytes: int, *, divisible: bool = True) -> T:
        """Like ``carry``, for a call that moves at most ``nbytes``. The caller reports the real number to ``took``."""
        return await (self._watched(client, call) if divisible and nbytes > self._min_bytes else call)

    def took(self, nbytes: int, seconds: float) -> None:
        """Record that a request or reply of ``nbytes`` took ``seconds``."""
        if seconds <= QUICK_S and 2 * nbytes > self.nbytes:  # a request from before the last doubling proves nothing
            self.nbytes = min(2 * self.nbytes, self._max_bytes)
        elif seconds > LATE_S and nbytes <= self.nbytes:  # nor one from before the last halving
            self.nbytes = max(self.nbytes // 2, self._min_bytes)

    async def _watched(self, client: Client, call: Coroutine[Any, Any, T]) -> T:
        calling = asyncio.ensure_future(call)
        try:
            while not (await asyncio.wait((calling,), timeout=LATE_S))[0]:
                try:
                    await client.ask(Ping(), Pong, timeout_s=PONG_S)
                except Unavailable:
                    if not calling.done():
                        self.nbytes = self._min_bytes
                        raise Stuck from None
            return calling.result()
        finally:
            calling.cancel()
            await asyncio.gather(calling, return_exceptions=True)
