"""The HTTP server for episodes: OpenAI-style calls on a loopback port, with one key per episode.

Consumes requests of the environments' processes, produces JSON. The key in ``Authorization`` identifies the episode of
a call; without the key of an active episode the call is rejected (401). A disconnect of the client ends its call. No
input ends the worker: invalid HTTP closes its connection, and an error inside a call returns a 500 and is logged.

Every user of the machine can connect. The key is therefore checked before any byte of the body is read, and connections
without a valid key are limited in number, time and memory. Connections of episodes are limited, too.
"""

import asyncio
import json
import logging
import secrets
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import h11

from staleflow.clients.rollout.episodes.chat.calls import CHAT, COMPLETIONS, ChatRefused

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 32 << 20
"""Maximum bytes of one request body."""
MAX_BODIES_BYTES = 256 << 20
"""Maximum total bytes of all bodies whose calls are unanswered."""
MAX_UNAUTHENTICATED = 1_024
"""Maximum connections without a valid key; one more closes the oldest. Each buffers at most one unfinished header."""
MAX_CONNECTIONS = 8_192
"""Maximum connections of episodes."""
HEADER_TIMEOUT_S = 10.0
"""From the connection to its first complete header."""
IDLE_TIMEOUT_S = 300.0
"""Between an answer and the next complete header."""
BODY_TIMEOUT_S = 60.0
"""For a whole body, and for a whole reply."""
LINGER_TIMEOUT_S = 1.0
"""Time for which input after a rejection is read and discarded: closing at once would lose the answer on its way."""
CHUNK = 1 << 16
BASE = "/v1"

Answer = Callable[[str, object], Awaitable[dict[str, Any]]]
"""Map (route, decoded body) to the decoded body of the reply; ``ChatRefused`` for an error."""


class ChatServer:
    """The server runs between ``start`` and ``close`` and belongs to one event loop."""

    def __init__(self) -> None:
        self._episodes: dict[str, Answer] = {}
        self._connections: set[asyncio.Task[None]] = set()
        self._unauthenticated: dict[asyncio.Task[None], None] = {}
        """The connections without a valid key so far, oldest first."""
        self._bodies_bytes = 0
        self._server: asyncio.Server | None = None
        self.base_url = ""
        """``http://127.0.0.1:PORT/v1`` after the start."""

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        self.base_url = f"http://127.0.0.1:{port}{BASE}"

    async def close(self) -> None:
        """Stop listening and close every connection."""
        if self._server is not None:
            self._server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def open(self, answer: Answer) -> str:
        """Register an episode and return its key."""
        key = f"episode-{secrets.token_hex(16)}"
        self._episodes[key] = answer
        return key

    def end(self, key: str) -> None:
        """Unregister an episode; its key becomes invalid."""
        self._episodes.pop(key, None)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if len(self._unauthenticated) >= MAX_UNAUTHENTICATED:
            oldest = next(iter(self._unauthenticated))
            del self._unauthenticated[oldest]
            oldest.cancel()
        self._connections.add(task)
        self._unauthenticated[task] = None
        connection = _Connection(reader, writer)
        try:
            while await self._exchange(connection, task):
                pass
            await connection.linger()
        except (h11.ProtocolError, OSError) as error:
            log.debug("connection closed: %s", error)
        except asyncio.CancelledError:
            pass  # the worker shuts down and no task awaits this one
        except Exception:  # boundary: a broken connection must not end the worker
            log.exception("connection closed by an unexpected error")
        finally:
            self._connections.discard(task)
            self._unauthenticated.pop(task, None)
            writer.close()

    async def _exchange(self, connection: "_Connection", task: "asyncio.Task[None]") -> bool:
        """Serve one request. Return False if it was the last one of its connection."""
        async with asyncio.timeout(HEADER_TIMEOUT_S if task in self._unauthenticated else IDLE_TIMEOUT_S):
            request = await connection.request()
        if request is None:
            return False
        budget = _BodyBudget(self)
        try:
            answer = self._find(request)
            self._unauthenticated.pop(task, None)
            if len(self._connections) - len(self._unauthenticated) > MAX_CONNECTIONS:
                raise ChatRefused(f"{MAX_CONNECTIONS} connections are open", "busy", status=503)
            try:
                async with asyncio.timeout(BODY_TIMEOUT_S):
                    body = await connection.body(budget.take)
            except TimeoutError as late:
                raise ChatRefused(f"the body took more than {BODY_TIMEOUT_S} s", "timeout", status=408) from late
            status, reply = 200, await connection.watched(answer(_path(request), _decoded(body)))
        except ChatRefused as no:
            status, reply = no.status, no.body()
        except _ClientDisconnected:
            return False
        except Exception:  # boundary: a bug in a call costs only that call
            log.exception("chat call failed")
            status, reply = 500, ChatRefused("the rollout worker failed", "internal", status=500).body()
        finally:
            budget.release()
        async with asyncio.timeout(BODY_TIMEOUT_S):
            await connection.reply(status, reply)
        return connection.prepare_next()

    def _find(self, request: h11.Request) -> Answer:
        headers = dict(request.headers)
        key = headers.get(b"authorization", b"").decode("ascii", "replace").removeprefix("Bearer ")
        answer = self._episodes.get(key)
        if answer is None:
            raise ChatRefused("this key belongs to no episode, or to one that is over", "invalid_api_key", status=401)
        path = _path(request)
        if path not in (CHAT, COMPLETIONS):
            raise ChatRefused(f"there is no {path}; {BASE}{CHAT} and {BASE}{COMPLETIONS} are", "not_found", status=404)
        if request.method != b"POST":
            raise ChatRefused("only POST is supported", "method", status=405)
        return answer

    def count_body(self, nbytes: int) -> None:
        """Add to the count of buffered body bytes. Raise ``ChatRefused`` if it exceeds the limit."""
        if nbytes > 0 and self._bodies_bytes + nbytes > MAX_BODIES_BYTES:
            detail = f"the bodies of all unanswered calls exceed {MAX_BODIES_BYTES} bytes"
            raise ChatRefused(detail, "busy", status=503)
        self._bodies_bytes += nbytes


class _BodyBudget:
    """One body's share of the server's buffered bytes."""

    def __init__(self, server: ChatServer) -> None:
        self._server, self._nbytes = server, 0

    def take(self, nbytes: int) -> None:
        self._server.count_body(nbytes)
        self._nbytes += nbytes

    def release(self) -> None:
        self._server.count_body(-self._nbytes)
        self._nbytes = 0


class _ClientDisconnected(Exception):
    """The client closed its connection before the answer."""


class _Connection:
    """One client connection: h11's state machine over a stream."""

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
            raise _ClientDisconnected
        return b"".join(parts)

    async def watched(self, answering: Awaitable[dict[str, Any]]) -> dict[str, Any]:
        """Return the answer. If the client disconnects, cancel ``answering`` and raise ``_ClientDisconnected``."""
        answer = asyncio.ensure_future(answering)
        reading = asyncio.ensure_future(self._reader.read(CHUNK))
        try:
            await asyncio.wait((answer, reading), return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                if not reading.result():
                    raise _ClientDisconnected
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

    async def reply(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        headers = [
            ("content-type", "application/json"),
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


def _path(request: h11.Request) -> str:
    path = request.target.decode("ascii", "replace").partition("?")[0]
    return path.removeprefix(BASE) if path.startswith(f"{BASE}/") else ""


def _decoded(body: bytes) -> object:
    try:
        return json.loads(body)
    except ValueError as error:
        raise ChatRefused(f"the body is not JSON: {error}", "malformed") from error
