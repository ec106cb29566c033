"""Limits on the TCP connections of a bound socket that ZeroMQ does not enforce.

ZeroMQ bounds a frame and the number of whole messages in its queue, but neither a message that never ends nor silence.
The kernel counts the bytes that a connection has received (TCP_INFO), and the transport reports which connection a
message came by (ZMQ_SRCFD). Received bytes beyond the whole messages are buffered in ZeroMQ, where they are otherwise
invisible. A connection that buffers too much or is silent is shut down; ZeroMQ then frees its buffer. An honest client
reconnects and retries.

Small frames cost ZeroMQ up to 32 times their bytes, so the growth of the process's own memory is watched, too.
"""

import logging
import os
import resource
import socket
import stat
import struct
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import Final

from staleflow.net.limits import TransportLimits

log = logging.getLogger(__name__)

POLL_INTERVAL_S: Final = 0.05
"""Interval between two checks of the process's memory."""
SCAN_INTERVAL_S: Final = 1.0
"""Interval between two scans of every connection, if memory does not grow."""
GROWTH_BYTES: Final = 16 << 20
"""Growth of the process's memory between two checks that triggers a scan of every connection."""
MAX_FIRST_MESSAGE_BYTES: Final = 64 << 10
"""Bytes that a connection may send before its first whole message; it is cut when two scans in a row find more. A
client sends a ping before each message of half that size."""
FRAMING_BYTES: Final = 2 << 20
"""Framing and encryption of the largest message with the most frames, and a handshake."""
CURVE_BYTES: Final = 33
"""Bytes that encryption adds to each frame: name, nonce, flags, authentication."""
SHORT_BYTES: Final = 255
"""A frame up to this size has a header of 2 bytes, a larger one of 9."""

RESERVED_FILES: Final = 128
"""Descriptors reserved for the rest of the process, if it may open as many again."""
MAX_LOG_LINES: Final = 5
"""Maximum number of cut connections that one scan logs individually."""

_PAGE: Final = os.sysconf("SC_PAGE_SIZE")
_TCP_INFO_BYTES: Final = 136
_BYTES_RECEIVED: Final = struct.Struct("@Q")
_BYTES_RECEIVED_AT: Final = 128
"""Offset of ``tcpi_bytes_received`` in ``struct tcp_info``; in every Linux since 4.1."""


class _Connection:
    """One accepted connection."""

    __slots__ = ("cut", "handled", "inode", "key", "last_message_s", "memory", "since_s", "strikes", "unfinished")

    def __init__(self, inode: int, now_s: float, memory: int) -> None:
        self.inode = inode
        self.since_s = now_s
        self.last_message_s = 0.0
        """Time of its last whole message, as of the last scan; 0 before the first."""
        self.handled = 0
        """Size of its whole messages on the wire."""
        self.unfinished = 0
        """Bytes received beyond those, buffered in ZeroMQ."""
        self.memory = memory
        """Memory of the process at the scan that saw its last whole message."""
        self.strikes = 0
        self.cut = False
        """True once shut down; ZeroMQ may not have noticed yet."""
        self.key = b""
        """Key of its last message."""


class Connections:
    """Connections of one bound socket.

    Call ``arrived`` for each message and ``poll`` every ``POLL_INTERVAL_S``, both from one thread.
    """

    def __init__(
        self,
        limits: TransportLimits,
        *,
        may_stay: Callable[[bytes], bool] = bool,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """``may_stay`` decides by key whether a connection may stay; connections without a key may always."""
        self.port = 0
        """Port of the bound socket."""
        self._limits = limits
        self._may_stay = may_stay
        self._now_s = now_s
        self._connections: dict[int, _Connection] = {}
        self._others: dict[int, int] = {}
        """Sockets that are not connections of this port: inode by descriptor."""
        self._keys: dict[int, bytes] = {}
        """Keys of the connections by which a message came since the last scan, by descriptor."""
        self._handled: dict[int, int] = {}
        """Size of these messages, by descriptor."""
        self._statm = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        """Kept open, because it is needed when no further file can be opened."""
        self._memory = private_bytes(self._statm)
        self._next_scan_s = 0.0
        self._polled_s = now_s()
        self._max_connections = max_open_connections(limits)
        self._lines = 0
        self.cut = 0
        """Number of connections that were shut down."""

    def arrived(self, descriptor: int, key: bytes, nbytes: int) -> None:
        """Record a whole message of ``nbytes`` on the wire that came by this connection with ``key``."""
        self._keys[descriptor] = key
        self._handled[descriptor] = self._handled.get(descriptor, 0) + nbytes

    def poll(self) -> None:
        """Scan if a scan is due or memory has grown."""
        memory, now_s = private_bytes(self._statm), self._now_s()
        # after a pause silence proves nothing: messages may wait unread
        if (late_s := now_s - self._polled_s) > SCAN_INTERVAL_S:
            self._credit_pause(late_s)
        self._polled_s = now_s
        grown = memory - self._memory >= GROWTH_BYTES or lowest_free(self._statm) > self._max_connections
        if now_s < self._next_scan_s and not grown:
            self._memory = min(self._memory, memory)
            return
        self.scan()

    def _credit_pause(self, late_s: float) -> None:
        for connection in self._connections.values():
            connection.since_s += late_s
            connection.last_message_s += late_s if connection.last_message_s else 0.0

    def scan(self) -> None:
        """Scan every connection now, and cut those beyond the limits."""
        now_s, self._memory = self._now_s(), private_bytes(self._statm)
        self._next_scan_s = now_s + SCAN_INTERVAL_S
        self._scan(now_s, self._memory)

    def unfinished(self) -> list[int]:
        """Return the bytes that each connection buffered at the last scan."""
        return [connection.unfinished for connection in self._connections.values()]

    def close(self) -> None:
        """Stop polling; idempotent."""
        if self._statm >= 0:
            os.close(self._statm)
            self._statm = -1

    def _scan(self, now_s: float, memory: int) -> None:
        self._lines = 0
        connections = dict(self._descriptors(now_s, memory))
        self._connections = connections
        for descriptor, connection in connections.items():
            self._measure(descriptor, connection, now_s, memory)
        self._keys.clear()
        self._handled.clear()
        for descriptor, why in list(self._offenders(now_s)):
            self._cut(descriptor, why)
        self._enforce_totals({d: c for d, c in connections.items() if not c.cut}, memory)
        if self._lines > MAX_LOG_LINES:
            log.warning("and %d more connections cut", self._lines - MAX_LOG_LINES)

    def _descriptors(self, now_s: float, memory: int) -> Iterator[tuple[int, _Connection]]:
        """Yield the accepted connections of this port, reusing the records of known ones."""
        for descriptor in open_files():
            try:
                status = os.fstat(descriptor)
            except OSError:
                continue
            if not stat.S_ISSOCK(status.st_mode) or self._others.get(descriptor) == status.st_ino:
                continue
            existing = self._connections.get(descriptor)
            if existing is not None and existing.inode == status.st_ino:
                yield descriptor, existing
            elif self._is_mine(descriptor):
                yield descriptor, _Connection(status.st_ino, now_s, memory)
            else:
                self._others[descriptor] = status.st_ino

    def _is_mine(self, descriptor: int) -> bool:
        try:
            with borrowed(descriptor) as connection:
                if connection.family not in (socket.AF_INET, socket.AF_INET6):
                    return False
                connection.getpeername()
                return bool(connection.getsockname()[1] == self.port)
        except OSError:
            return False

    def _measure(self, descriptor: int, connection: _Connection, now_s: float, memory: int) -> None:
        received = received_bytes(descriptor)
        if descriptor in self._keys:
            connection.key = self._keys[descriptor]
            connection.last_message_s, connection.memory = now_s, memory
            connection.strikes = 0
            connection.handled = min(connection.handled + self._handled[descriptor], received)
        connection.unfinished = received - connection.handled

    def _offenders(self, now_s: float) -> Iterator[tuple[int, str]]:
        """Yield the connections that exceed a limit of their own, with the reason."""
        limits = self._limits
        for descriptor, connection in self._connections.items():
            if connection.cut:
                continue
            if connection.unfinished > limits.max_message_bytes + FRAMING_BYTES:
                yield descriptor, f"it sent {connection.unfinished} bytes without completing a message"
            elif connection.key and not self._may_stay(connection.key):
                yield descriptor, "its key is no longer allowed"
            elif now_s - (connection.last_message_s or connection.since_s) > limits.idle_s:
                yield descriptor, f"it sent nothing for {limits.idle_s:g} s"
            elif not connection.last_message_s and connection.unfinished > MAX_FIRST_MESSAGE_BYTES:
                connection.strikes += 1
                self._next_scan_s = 0.0  # confirm at the next poll: the message may complete meanwhile
                if connection.strikes > 1:
                    yield descriptor, f"it sent {connection.unfinished} bytes before its first message"

    def _enforce_totals(self, connections: dict[int, _Connection], memory: int) -> None:
        """Cut connections until the limits of all together hold: silent ones first, then those that buffer most."""
        limits = self._limits
        order = sorted(connections, key=lambda d: (connections[d].last_message_s > 0, connections[d].since_s))
        for descriptor in order[: max(len(order) - self._max_connections, 0)]:
            self._cut(descriptor, f"there are more than {self._max_connections} connections")
            del connections[descriptor]
        # includes cut ones, which keep their buffers for a while
        total = sum(connection.unfinished for connection in self._connections.values())
        for descriptor in sorted(connections, key=lambda d: connections[d].unfinished, reverse=True):
            connection = connections[descriptor]
            if connection.unfinished <= MAX_FIRST_MESSAGE_BYTES:
                return
            overgrown = memory - connection.memory > limits.max_growth_bytes + 2 * total
            if total > limits.max_unfinished_bytes or overgrown:
                self._cut(descriptor, f"unfinished messages hold {max(total, memory - connection.memory)} bytes")
                total -= 0 if overgrown else connection.unfinished

    def _cut(self, descriptor: int, why: str) -> None:
        """Shut a connection down. ZeroMQ sees its end, frees its buffer and closes the descriptor."""
        try:
            with borrowed(descriptor) as connection:
                peer = connection.getpeername()
                connection.shutdown(socket.SHUT_RDWR)
        except OSError:  # already closed
            return
        self._connections[descriptor].cut = True
        self.cut += 1
        self._lines += 1
        if self._lines <= MAX_LOG_LINES:
            log.warning("connection of %s:%d cut: %s", peer[0], peer[1], why)


def wire_bytes(sizes: list[int], added: int = 0) -> int:
    """Return the size of frames on the wire (ZMTP 3); encryption adds ``added`` bytes to each."""
    return sum(size + added + (2 if size + added <= SHORT_BYTES else 9) for size in sizes)


@contextmanager
def borrowed(descriptor: int) -> Generator[socket.socket]:
    """Yield a socket object for a descriptor that ZeroMQ owns and closes."""
    connection = socket.socket(fileno=descriptor)
    try:
        yield connection
    finally:
        connection.detach()  # or Python would close a descriptor that ZeroMQ still uses


def received_bytes(descriptor: int) -> int:
    """Return the bytes that the kernel has received by a connection; 0 when it is closed."""
    try:
        with borrowed(descriptor) as connection:
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    except OSError:
        return 0
    return int(_BYTES_RECEIVED.unpack_from(info, _BYTES_RECEIVED_AT)[0])


def max_open_connections(limits: TransportLimits) -> int:
    """Return the limit, or less where the process may not open as many files."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return limits.max_connections
    return min(limits.max_connections, max(files - RESERVED_FILES, files // 2))


def lowest_free(open_file: int) -> int:
    """Return the descriptor that the next file would get, a lower bound of the open files; the limit when none is
    left."""
    try:
        # The kernel hands out the lowest free descriptor, so one dup bounds the count without listing /proc/self/fd.
        free = os.dup(open_file)
    except OSError:
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    os.close(free)
    return free


def open_files() -> Iterable[int]:
    """Return the descriptors that may be open; all possible ones when none is left to list them."""
    try:
        return [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError:
        return range(resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def private_bytes(statm: int) -> int:
    """Return the resident memory of this process that no file backs. ``statm`` is its open /proc/self/statm."""
    fields = os.pread(statm, 128, 0).split()
    return (int(fields[1]) - int(fields[2])) * _PAGE
