"""HTTP endpoint for Prometheus: ``GET /metrics``.

A client costs little, whatever it sends: few connections at a time, one request each, short heads, no body, a timeout
of seconds. Plain HTTP without keys, so it binds to loopback or requires a token.
"""

import asyncio
import hmac
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final
from urllib.parse import urlsplit

import h11

from staleflow.configs.errors import ConfigError
from staleflow.net.addresses import check_bind

log = logging.getLogger(__name__)

PATH: Final = "/metrics"
TEXT: Final = "text/plain; version=0.0.4; charset=utf-8"
MAX_CONNECTIONS: Final = 8
MAX_HEAD_BYTES: Final = 8_192
EXCHANGE_TIMEOUT_S: Final = 5.0
"""Timeout of a whole exchange."""

Answer = Callable[[], Awaitable[bytes]]


class ScrapeServer:
    """Serves from ``start`` to ``close``, on one event loop."""

    def __init__(self, bind: str, answer: Answer, *, token: str = "", wide: bool = False) -> None:
        """``bind`` is http://host:port. ``token`` is the bearer token of readers, empty for none. ``wide`` permits more
        than loopback.

        Raises ``ConfigError`` for an address that cannot be bound.
        """
        parts = urlsplit(bind)
        checked = urlsplit(check_bind(f"tcp://{parts.netloc}", wide=wide))
        self._host, self._port = checked.hostname or "", parts.port or 0
        self._bind = bind
        self._answer = answer
        self._token = token.encode()
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.url = ""
        """URL of the metrics, once started."""

    async def start(self) -> None:
        """Listen. Raise ``ConfigError`` if the address is in use or not of this machine."""
        try:
            self._server = await asyncio.start_server(
                self._connected, self._host, self._port, limit=MAX_HEAD_BYTES, backlog=MAX_CONNECTIONS
            )
        except OSError as error:
            raise ConfigError("metrics.bind", self._bind, f"the system refuses it: {error.strerror}") from None
        host, port = self._server.sockets[0].getsockname()[:2]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}{PATH}"

    async def close(self) -> None:
        """Stop listening and end every connection."""
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if len(self._tasks) >= MAX_CONNECTIONS:
            writer.close()
            return
        self._tasks.add(task)
        # then drain() returns only once the system has taken everything
        writer.transport.set_write_buffer_limits(high=0)
        try:
            async with asyncio.timeout(EXCHANGE_TIMEOUT_S):
                await self._exchange(reader, writer)
        except (h11.ProtocolError, OSError, TimeoutError) as error:
            log.debug("metrics connection closed: %s", error)
        except Exception:  # boundary: a failure to report metrics must not end the server
            log.exception("metrics request failed")
        finally:
            self._tasks.discard(task)
            writer.transport.abort()  # close() would wait without limit for a client that reads nothing

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        http = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD_BYTES)
        while (event := http.next_event()) is h11.NEED_DATA:
            http.receive_data(await reader.read(MAX_HEAD_BYTES))
        if not isinstance(event, h11.Request):
            return
        status, body = await self._reply(event)
        headers = [("content-type", TEXT), ("content-length", str(len(body))), ("connection", "close")]
        if status == 401:
            headers.append(("www-authenticate", "Bearer"))
        parts = [http.send(h11.Response(status_code=status, headers=headers))]
        if event.method != b"HEAD":
            parts.append(http.send(h11.Data(data=body)))
        for part in parts:
            writer.write(part or b"")
        await writer.drain()
        with suppress(OSError):
            writer.write_eof()

    async def _reply(self, request: h11.Request) -> tuple[int, bytes]:
        if self._token:
            given = dict(request.headers).get(b"authorization", b"")
            if not hmac.compare_digest(given, b"Bearer " + self._token):
                return 401, b"a token is needed: Authorization: Bearer ...\n"
        if request.target.partition(b"?")[0] != PATH.encode():
            return 404, f"there is {PATH} only\n".encode()
        if request.method not in (b"GET", b"HEAD"):
            return 405, b"GET only\n"
        return 200, await self._answer()
