"""One client connection of the server: h11's state machine over a stream."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import h11

from staleflow.clients.rollout.episodes.chat.apis.events import EventStream
from staleflow.clients.rollout.episodes.chat.refusal import ChatRefused

MAX_BODY_BYTES = 32 << 20
"""Maximum bytes of one request body."""
LINGER_TIMEOUT_S = 1.0
"""Time for which input after a rejection is read and discarded: closing at once would lose the answer on its way."""
CHUNK = 1 << 16

Reply = dict[str, Any] | EventStream


class ClientDisconnected(Exception):
    """The client closed its connection before the answer."""


class Connection:
    """The connection between two reads of the server."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._http = h11.Connection(h11.SERVER)

    async def request(self) -> h11.Request | None:
        """Return the next request; None if the client has closed."""
        event = await self._event()
        return event if isinstance(event, h11.Request) else None

    async def body(self, take: Callable[[int], None]) -> bytes:
        """Read the body of the current request. ``take`` receives the size of each chunk and may reject it."""
        if self._http.they_are_waiting_for_100_continue:
            await self._send(h11.InformationalResponse(status_code=100, headers=[]))
        parts, size = list[bytes](), 0
        while isinstance(event := await self._event(), h11.Data):
            size += len(event.data)
            if size > MAX_BODY_BYTES:
                raise ChatRefused(f"the body has more than {MAX_BODY_BYTES} bytes", "too_large", status=413)
            take(len(event.data))
            parts.append(bytes(event.data))
        if not isinstance(event, h11.EndOfMessage):
            raise ClientDisconnected
        return b"".join(parts)

    async def watched(self, answering: Awaitable[Reply]) -> Reply:
        """Return the answer. If the client disconnects, cancel ``answering`` and raise ``ClientDisconnected``."""
        answer = asyncio.ensure_future(answering)
        reading = asyncio.ensure_future(self._reader.read(CHUNK))
        try:
            await asyncio.wait((answer, reading), return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                if not reading.result():
                    raise ClientDisconnected
                await asyncio.wait((answer,))
            if answer.cancelled():
                raise ChatRefused("the episode is over", "episode_over")
            return answer.result()
        finally:
            await self._unwatch(reading)
            answer.cancel()
            await asyncio.gather(answer, return_exceptions=True)

    async def _unwatch(self, reading: "asyncio.Future[bytes]") -> None:
        """Stop watching for a disconnect; bytes that were read are the start of the next request."""
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        if not reading.cancelled() and reading.exception() is None:
            self._http.receive_data(reading.result())

    async def reply(self, status: int, body: Reply) -> None:
        """Send the reply. A stream of events has its whole length: it is complete when it starts."""
        streamed = isinstance(body, EventStream)
        data = body.data if isinstance(body, EventStream) else json.dumps(body).encode()
        headers = [
            ("content-type", "text/event-stream" if streamed else "application/json"),
            ("content-length", str(len(data))),
            ("x-should-retry", str(status == 503).lower()),  # a retry of any other rejection would fail again
        ]
        await self._send(h11.Response(status_code=status, headers=headers))
        await self._send(h11.Data(data=data))
        await self._send(h11.EndOfMessage())

    async def linger(self) -> None:
        """Discard input after the last answer until the client closes or ``LINGER_TIMEOUT_S`` have passed."""
        self._writer.write_eof()
        with suppress(TimeoutError):
            async with asyncio.timeout(LINGER_TIMEOUT_S):
                while await self._reader.read(CHUNK):
                    pass

    def prepare_next(self) -> bool:
        """Return whether the connection can carry another request, and prepare it if so."""
        if self._http.our_state is not h11.DONE or self._http.their_state is not h11.DONE:
            return False
        self._http.start_next_cycle()
        return True

    async def _event(self) -> Any:
        while (event := self._http.next_event()) is h11.NEED_DATA:
            self._http.receive_data(await self._reader.read(CHUNK))
        return event

    async def _send(self, event: h11.Event) -> None:
        data = self._http.send(event)
        if data:
            self._writer.write(data)
            await self._writer.drain()
