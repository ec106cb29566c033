"""The HTTP server for episodes: OpenAI- and Anthropic-style calls, with one key per episode.

Consumes requests of the environments' processes and their agents, produces JSON or server-sent events. The key in
``Authorization`` or ``x-api-key`` identifies the episode of a call; without the key of an active episode the call is
rejected (401). A disconnect of the client ends its call. No input ends the worker: invalid HTTP closes its connection,
and an error inside a call returns a 500 and is logged.

Every user of the machine can connect, and every host that reaches ``environment.host``. The key is therefore checked
before any byte of the body is read, and connections without a valid key are limited in number, time and memory.
Connections of episodes are limited, too.
"""

import asyncio
import errno
import json
import logging
import secrets
import socket
from collections.abc import Awaitable, Callable

import h11

from staleflow.clients.rollout.episodes.chat.connection import ClientDisconnected, Connection, Reply
from staleflow.clients.rollout.episodes.chat.refusal import ChatRefused
from staleflow.clients.rollout.episodes.chat.routes import BASE, CHAT, COMPLETIONS, MESSAGES, MODELS
from staleflow.configs.errors import ConfigError

log = logging.getLogger(__name__)

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
METHODS = {CHAT: b"POST", COMPLETIONS: b"POST", MESSAGES: b"POST", MODELS: b"GET"}
EVERY_INTERFACE = ("0.0.0.0", "::")
MAX_PORTS = 64
"""Number of ports, from the configured one on, that the workers of one machine may take."""

Answer = Callable[[str, object], Awaitable[Reply]]
"""Map (route, decoded body) to the reply; ``ChatRefused`` for an error."""


class ChatServer:
    """The server runs between ``start`` and ``close`` and belongs to one event loop."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0, advertise: str = "") -> None:
        """``host``, ``port`` and ``advertise`` are those of ``[environment]``."""
        self._host, self._port = host, port
        self._advertise = advertise or (socket.gethostname() if host in EVERY_INTERFACE else host)
        self._episodes: dict[str, Answer] = {}
        self._connections: set[asyncio.Task[None]] = set()
        self._unauthenticated: dict[asyncio.Task[None], None] = {}
        """The connections without a valid key so far, oldest first."""
        self._bodies_bytes = 0
        self._server: asyncio.Server | None = None
        self.base_url = ""
        """``http://HOST:PORT/v1`` after the start."""

    async def start(self) -> None:
        """Bind the first free port of ``MAX_PORTS``. ``ConfigError`` if the system refuses."""
        self._server = await self._bound()
        port = self._server.sockets[0].getsockname()[1]
        host = f"[{self._advertise}]" if ":" in self._advertise else self._advertise
        self.base_url = f"http://{host}:{port}{BASE}"

    async def _bound(self) -> asyncio.Server:
        last = min(self._port + MAX_PORTS - 1, 65_535) if self._port else 0
        for port in range(self._port, last + 1):
            try:
                return await asyncio.start_server(self._connected, self._host, port)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    allowed = f"the system refuses it: {error.strerror or error}; it must be an address of this machine"
                    raise ConfigError("environment.host", self._host, allowed) from None
        allowed = f"ports {self._port} to {last} are all in use; choose another one, or 0 for any free port"
        raise ConfigError("environment.port", self._port, allowed)

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
        connection = Connection(reader, writer)
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

    async def _exchange(self, connection: Connection, task: "asyncio.Task[None]") -> bool:
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
            call = None if request.method == b"GET" else _decoded(body)
            status, reply = 200, await connection.watched(answer(_path(request), call))
        except ChatRefused as no:
            status, reply = no.status, _error(request, no)
        except ClientDisconnected:
            return False
        except Exception:  # boundary: a bug in a call costs only that call
            log.exception("chat call failed")
            status, reply = 500, _error(request, ChatRefused("the rollout worker failed", "internal", status=500))
        finally:
            budget.release()
        async with asyncio.timeout(BODY_TIMEOUT_S):
            await connection.reply(status, reply)
        return connection.prepare_next()

    def _find(self, request: h11.Request) -> Answer:
        headers = dict(request.headers)
        given = headers.get(b"authorization") or headers.get(b"x-api-key", b"")
        answer = self._episodes.get(given.decode("ascii", "replace").removeprefix("Bearer "))
        if answer is None:
            raise ChatRefused("this key belongs to no episode, or to one that is over", "invalid_api_key", status=401)
        path = _path(request)
        if path not in METHODS:
            routes = ", ".join(BASE + route for route in METHODS)
            raise ChatRefused(
                f"there is no {path or request.target!r}; the paths are {routes}", "not_found", status=404
            )
        if request.method != METHODS[path]:
            raise ChatRefused(f"only {METHODS[path].decode()} is supported here", "method", status=405)
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


def _path(request: h11.Request) -> str:
    path = request.target.decode("ascii", "replace").partition("?")[0]
    return path.removeprefix(BASE) if path.startswith(f"{BASE}/") else ""


def _error(request: h11.Request, refused: ChatRefused) -> Reply:
    return refused.anthropic_body() if _path(request) == MESSAGES else refused.body()


def _decoded(body: bytes) -> object:
    try:
        return json.loads(body)
    except ValueError as error:
        raise ChatRefused(f"the body is not JSON: {error}", "malformed") from error
