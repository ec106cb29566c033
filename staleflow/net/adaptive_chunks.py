"""How much is asked for, or sent, at once: what a connection carries in a moment, learned from how long answers take.

A message that is on its way keeps everything behind it waiting, heartbeats too. So it starts small, doubles when the
answer to one of about the present size comes quickly, and halves when one comes late.
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
"""An answer within this may be twice as large. Longer than the way round the world and back."""
LATE_S = 0.5
"""One that takes longer is too large: well below the time after which a client asks again."""
PONG_S = 1.4
"""In which a ping is answered that was sent after ``LATE_S``, or the connection is stuck. Both together are less than
the client needs to replace the connection, after which the ping would be through."""

T = TypeVar("T")


class Stuck(Exception):
    """The connection has not carried it. It should be tried again in smaller portions."""


class Portion:
    """Of what goes over one connection at once. Belongs to one loop; kept as long as the connection."""

    def __init__(self, most: int) -> None:
        self._least = min(MIN_BYTES, most)
        self._most = most
        self.nbytes = min(FIRST_BYTES, most)
        """Of the next message, together with its answer."""

    async def carry(self, client: Client, call: Coroutine[Any, Any, T], nbytes: int, *, divisible: bool = True) -> T:
        """The result of a call of ``client`` that takes so many bytes over its connection, and learn from it.

        ``Stuck`` when it could be smaller and the connection does not even bring an answer to a ping; a server that
        has no answer yet is waited for.
        """
        clock = asyncio.get_running_loop().time
        began = clock()
        result = await self.watch(client, call, nbytes, divisible=divisible)
        self.took(nbytes, clock() - began)
        return result

    async def watch(self, client: Client, call: Coroutine[Any, Any, T], nbytes: int, *, divisible: bool = True) -> T:
        """As ``carry``, for a call that takes so many bytes at most: ``took`` is called by who knows how many."""
        return await (self._watched(client, call) if divisible and nbytes > self._least else call)

    def took(self, nbytes: int, seconds: float) -> None:
        """So many bytes were asked for, or sent, and answered after this time."""
        if seconds <= QUICK_S and 2 * nbytes > self.nbytes:  # what was asked for before it doubled says nothing new
            self.nbytes = min(2 * self.nbytes, self._most)
        elif seconds > LATE_S and nbytes <= self.nbytes:  # nor what was before it halved
            self.nbytes = max(self.nbytes // 2, self._least)

    async def _watched(self, client: Client, call: Coroutine[Any, Any, T]) -> T:
        calling = asyncio.ensure_future(call)
        try:
            while not (await asyncio.wait((calling,), timeout=LATE_S))[0]:
                try:
                    await client.ask(Ping(), Pong, timeout_s=PONG_S)
                except Unavailable:
                    if not calling.done():
                        self.nbytes = self._least
                        raise Stuck from None
            return calling.result()
        finally:
            calling.cancel()
            await asyncio.gather(calling, return_exceptions=True)
