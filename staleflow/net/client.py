"""The client side: one DEALER to one server, in an async and a blocking form.

- A call ends when its reply arrives. Until then its request is sent again with the same id: after a time without a
  reply, and when the server was busy.
- After three heartbeats without a message from the server the connection may be dead: the client replaces the socket
  and sends pending requests again. If no new socket can be opened, it retries each heartbeat. Only the caller's
  ``timeout_s`` ends a call without a reply.
"""

import asyncio
import logging
import random
import secrets
import threading
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future as ThreadFuture
from typing import Any, Final, TypeVar

import uvloop
import zmq

from staleflow.configs.errors import ConfigError
from staleflow.net.addresses import check_connect
from staleflow.net.errors import Refused, Unavailable
from staleflow.net.limits import TransportLimits
from staleflow.net.retry import Backoff
from staleflow.net.transport import SOCKETS, Link, Transport
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.consistency.ids import WorkerId
from staleflow.protocols.wire.codec import Data, ProtocolError, VersionError, decode_reply, encode_request
from staleflow.protocols.wire.messages import PROTOCOL, Ping, Refusal, Reply, Request

log = logging.getLogger(__name__)

T = TypeVar("T")
Answer = tuple[Reply, list[memoryview]]

DEFAULT_LIMITS: Final = TransportLimits()
ROUTE_BYTES: Final = 255
"""Longest routing id that ZeroMQ accepts."""
NONCE_BYTES: Final = 8
"""Random bytes of a route, which must not be guessable: a connection with the same route would receive the replies."""
CLOCK_GRAIN_S: Final = 0.002
"""A timer of the loop may fire early by this much."""
MIN_BUSY_S: Final = 0.01
"""Minimum delay before a request to a busy server is sent again."""
PING_BEFORE_BYTES: Final = 32_768
"""A larger message follows a ping, because a server cuts a new connection whose first message takes long."""
_PING: Final = encode_request(0, Ping())


def worker_id(name: str) -> WorkerId:
    """Return ``name`` with a nonce: unique to the lifetime of this process."""
    return WorkerId(f"{name}.{secrets.token_hex(4)}")


def nbytes_of(parts: Sequence[Data]) -> int:
    """Return the size of a message."""
    return sum(part.nbytes if isinstance(part, memoryview) else len(part) for part in parts)


class _Pending:
    """A request that waits for its reply."""

    __slots__ = ("attempt", "busy_s", "deadline_s", "future", "id", "nbytes", "parts", "started_s", "timer", "why")

    def __init__(self, id: int, parts: list[Data], future: "asyncio.Future[Answer]", started_s: float) -> None:
        self.id = id
        self.parts = parts
        self.nbytes = nbytes_of(parts)
        self.future = future
        self.started_s = started_s
        self.deadline_s = float("inf")
        self.attempt = 0
        self.timer: asyncio.TimerHandle | None = None
        self.busy_s: float | None = None
        """Time of the server's first reply that it is busy for a limited time; None if its last reply had no limit."""
        self.why = ""

    def is_final(self, busy: Refusal, now_s: float) -> bool:
        """Return whether the time limit of a busy reply has passed since the server first sent one."""
        if not busy.retry_for_ms:
            self.busy_s = None
            return False
        self.busy_s = now_s if self.busy_s is None else self.busy_s
        return now_s - self.busy_s >= busy.retry_for_ms / 1_000


class Client:
    """Client of one server. Connects at the first call and belongs to the loop of that call."""

    def __init__(
        self,
        address: str,
        *,
        worker: WorkerId,
        limits: TransportLimits = DEFAULT_LIMITS,
        transport: Transport = SOCKETS,
    ) -> None:
        self.address = check_connect(address)
        self._route = f"{worker}/{secrets.token_hex(NONCE_BYTES)}".encode()
        if len(self._route) > ROUTE_BYTES:
            raise ConfigError("worker", worker, f"its name must have at most {ROUTE_BYTES - 2 * NONCE_BYTES - 1} bytes")
        self._limits = limits
        self._backoff = Backoff(limits.retry_s, limits.retry_cap_s)
        self._pending: dict[int, _Pending] = {}
        self._last_id = 0
        self._transport = transport
        self._link: Link | None = None
        """None before the first call, and while the socket cannot be replaced."""
        self._received_s = 0.0
        self._sent_s = 0.0
        self._heartbeat: asyncio.TimerHandle | None = None
        self._closed = False

    async def call(self, body: Request, frames: Sequence[Data] = (), *, timeout_s: float | None = 30.0) -> Answer:
        """Return the reply and its raw frames. Frames are not copied: do not change their bytes before the reply
        arrives.

        Raise ``Refused`` for a refusal (for ``busy`` only after the server's own time limit), ``Unavailable`` after
        ``timeout_s`` (None waits without limit), ``ConfigError`` if the server speaks another protocol version.
        """
        pending = self._ask(body, frames, timeout_s)
        try:
            self._transmit(pending, pending.started_s)
            reply, answer_frames = await pending.future
        finally:
            self._forget(pending)
        if type(reply) is Refusal:
            raise Refused(reply.code, reply.detail)
        return reply, answer_frames

    async def ask(
        self, body: Request, reply_type: type[T], frames: Sequence[Data] = (), *, timeout_s: float | None = 30.0
    ) -> T:
        """Like ``call``, for a reply of one type without frames. Raise ``ProtocolError`` for another type."""
        reply, _ = await self.call(body, frames, timeout_s=timeout_s)
        if not isinstance(reply, reply_type):
            detail = f"{self.address} answered {type(body).__name__} with {type(reply).__name__}"
            raise ProtocolError(Code.MALFORMED, f"{detail}, not {reply_type.__name__}")
        return reply

    def close(self) -> None:
        """Close; pending calls raise ``Unavailable``. Call from the loop's thread; idempotent."""
        self._closed = True
        if self._heartbeat is not None:
            self._heartbeat.cancel()
        for pending in list(self._pending.values()):
            self._fail(pending)
        if self._link is not None:
            self._link.close()

    def _ask(self, body: Request, frames: Sequence[Data], timeout_s: float | None) -> _Pending:
        loop = asyncio.get_running_loop()
        now = loop.time()
        if self._closed:
            raise Unavailable(self.address, 0.0, "this client is closed")
        if len(self._pending) >= self._limits.max_pending:
            raise Refused(Code.BUSY, f"{len(self._pending)} calls to {self.address} are pending already")
        self._last_id += 1
        parts: list[Data] = [encode_request(self._last_id, body), *frames]
        self._check_size(parts)
        if self._heartbeat is None:
            self._connect(now)
        pending = _Pending(self._last_id, parts, loop.create_future(), now)
        if timeout_s is not None:
            pending.deadline_s = now + timeout_s
        self._pending[pending.id] = pending
        return pending

    def _check_size(self, parts: list[Data]) -> None:
        size = nbytes_of(parts)
        limits = self._limits
        if len(parts[0]) > limits.max_header_bytes:
            raise Refused(Code.OVERSIZE, f"a header of {len(parts[0])} bytes; at most {limits.max_header_bytes}")
        if size > limits.max_message_bytes or len(parts) - 1 > limits.max_frames:
            actual = f"{size} bytes in {len(parts) - 1} frames"
            raise Refused(Code.OVERSIZE, f"{actual}; at most {limits.max_message_bytes} in {limits.max_frames}")

    # Sending -----------------------------------------------------------------------------------------------------

    def _transmit(self, pending: _Pending, now: float) -> None:
        """Send the request if there is a socket, and set the timer of the next retry."""
        pending.attempt += 1
        # The timer is set even without a socket: it also enforces the deadline.
        self._set_timer(pending, now, self._backoff.delay_s(pending.attempt))
        if self._link is None:
            return
        if pending.nbytes > PING_BEFORE_BYTES:
            self._link.send((_PING,))
        if self._link.send(pending.parts):
            self._sent_s = now

    def _set_timer(self, pending: _Pending, now: float, delay_s: float) -> None:
        if pending.timer is not None:
            pending.timer.cancel()
        loop = asyncio.get_running_loop()
        pending.timer = loop.call_at(min(now + delay_s, pending.deadline_s), self._due, pending)

    def _due(self, pending: _Pending) -> None:
        now = asyncio.get_running_loop().time()
        if now >= pending.deadline_s - CLOCK_GRAIN_S:
            self._fail(pending)
        elif not pending.future.done():
            self._transmit(pending, now)

    def _forget(self, pending: _Pending) -> None:
        self._pending.pop(pending.id, None)
        if pending.timer is not None:
            pending.timer.cancel()

    def _fail(self, pending: _Pending) -> None:
        waited_s = asyncio.get_running_loop().time() - pending.started_s
        if not pending.future.done():
            pending.future.set_exception(Unavailable(self.address, waited_s, pending.why))

    # Receiving ---------------------------------------------------------------------------------------------------

    def _receive(self, head: list[bytes], frames: list[memoryview], oversize: bool) -> None:
        now = self._received_s = asyncio.get_running_loop().time()
        try:
            id, reply = decode_reply(head[0])
        except VersionError as error:
            self._fail_all(error)
            return
        except ProtocolError as error:
            log.warning("%s sent an unreadable message: %s", self.address, error.detail)
            return
        if (pending := self._pending.get(id)) is None:
            if type(reply) is Refusal and reply.code is Code.DENIED and id == 0:
                self._deny_all(reply)
            elif type(reply) is Refusal:
                log.warning("%s refused an unknown request: %s %s", self.address, reply.code.value, reply.detail)
            return
        if pending.future.done():
            return
        if oversize:
            reply = Refusal(code=Code.OVERSIZE, detail=f"the answer of {self.address} exceeds this client's limits")
        if type(reply) is Refusal and reply.code is Code.BUSY and not pending.is_final(reply, now):
            pending.why = reply.detail
            base_s = max(reply.retry_after_ms / 1_000, MIN_BUSY_S)
            self._set_timer(pending, now, Backoff(base_s, max(base_s, self._limits.retry_cap_s)).delay_s(1))
            return
        pending.future.set_result((reply, frames))

    def _deny_all(self, reply: Refusal) -> None:
        """Fail every call: the server rejects this connection, whatever the request."""
        for pending in self._pending.values():
            if not pending.future.done():
                pending.future.set_result((reply, []))

    def _fail_all(self, error: VersionError) -> None:
        """Fail every call with both versions: no reply of a server with another protocol version can be trusted."""
        for pending in self._pending.values():
            if not pending.future.done():
                allowed = f"this client speaks {PROTOCOL}; use the staleflow that the run was started with"
                pending.future.set_exception(ConfigError(f"protocol of {self.address}", error.theirs, allowed))

    # The connection ----------------------------------------------------------------------------------------------

    def _connect(self, now: float) -> None:
        link = self._transport.connect(self.address, self._route, limits=self._limits, on_message=self._receive)
        try:
            link.start()
        except BaseException:
            link.close(linger_ms=0)
            raise
        self._link = link
        self._received_s = now
        # jitter keeps the heartbeats of a thousand clients apart
        self._beat_later(self._limits.heartbeat_s * random.random())

    def _beat_later(self, delay_s: float) -> None:
        loop = asyncio.get_running_loop()
        due_s = loop.time() + delay_s
        self._heartbeat = loop.call_at(due_s, self._beat, due_s)

    def _beat(self, due_s: float) -> None:
        """Ping the server, or replace a dead connection. A late beat proves nothing: replies may wait unread."""
        now = asyncio.get_running_loop().time()
        late = now >= due_s + self._limits.heartbeat_s / 2
        if self._link is None or (now - self._received_s > self._limits.silence_s and not late):
            self._replace(now)
            return
        self._beat_later(self._limits.heartbeat_s)
        # A request that is sent again while the server works on it gets no reply, so a ping shows that the server is
        # alive.
        quiet_s = now - min(self._sent_s, self._received_s)
        if quiet_s > self._limits.heartbeat_s / 2 and self._link.send((_PING,)):
            self._sent_s = now

    def _replace(self, now: float) -> None:
        """Open a new socket and send pending requests again; if that fails, retry at the next beat."""
        link, self._link = self._link, None
        try:
            if link is not None:
                link.close(linger_ms=0)
            self._connect(now)
        except (zmq.ZMQError, OSError) as error:
            log.warning("no new connection to %s for now: %s", self.address, error)
            self._beat_later(self._limits.heartbeat_s)
            return
        for pending in self._pending.values():
            if not pending.future.done():
                self._transmit(pending, now)


class BlockingClient:
    """A blocking client for training loops: a ``Client`` on a loop in its own thread. Safe to use from several
    threads."""

    def __init__(
        self,
        address: str,
        *,
        worker: WorkerId,
        limits: TransportLimits = DEFAULT_LIMITS,
        transport: Transport = SOCKETS,
    ) -> None:
        self._client = Client(address, worker=worker, limits=limits, transport=transport)
        self.address = self._client.address
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"client {address}", daemon=True)
        self._thread.start()

    def call(self, body: Request, frames: Sequence[Data] = (), *, timeout_s: float | None = 30.0) -> Answer:
        """Like ``Client.call``, but blocking."""
        return self._run(self._client.call(body, frames, timeout_s=timeout_s))

    def ask(
        self, body: Request, reply_type: type[T], frames: Sequence[Data] = (), *, timeout_s: float | None = 30.0
    ) -> T:
        """Like ``Client.ask``, but blocking."""
        return self._run(self._client.ask(body, reply_type, frames, timeout_s=timeout_s))

    def close(self) -> None:
        """Close the client and end its thread; idempotent."""
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        """Close, then wait until the threads with pending calls have received their errors."""
        self._client.close()
        if others := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(others)

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        if self._loop.is_closed():
            coroutine.close()
            raise Unavailable(self.address, 0.0, "this client is closed")
        future: ThreadFuture[T] = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise
