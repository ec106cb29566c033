"""The TCP connections of a bound socket, kept within bounds that ZeroMQ does not know.

ZeroMQ bounds a frame and the number of whole messages that wait, but not a message that never ends, and not silence.
The kernel counts what a connection has received (TCP_INFO), the transport tells which connection a message came by
(ZMQ_SRCFD): what was received beyond the whole messages that came is what ZeroMQ holds and nobody can see. A connection
that holds too much, or says nothing, is shut down; ZeroMQ then forgets what it held for it. An honest client connects
again and asks again.

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
"""Between two looks at the process's memory."""
SCAN_S: Final = 1.0
"""Between two looks at every connection, if memory does not grow."""
GROWTH_BYTES: Final = 16 << 20
"""Growth of the process's memory between two looks that makes every connection be looked at."""
STRANGER_BYTES: Final = 64 << 10
"""What a connection may send before its first whole message is here; twice in a row is too much. A client sends a ping
before each message of half that size."""
FRAMING_BYTES: Final = 2 << 20
"""Framing and encryption of the largest message with the most frames, and a handshake."""
CURVE_BYTES: Final = 33
"""What encryption adds to each frame: name, nonce, flags, authentication."""
SHORT_BYTES: Final = 255
"""A frame up to this size has a header of 2 bytes, a larger one of 9."""

SPARE_FILES: Final = 128
"""Descriptors that the process keeps for everything else, if it may have as many again."""
MAX_LINES: Final = 5
"""Cut connections that one scan tells one by one."""

_PAGE: Final = os.sysconf("SC_PAGE_SIZE")
_TCP_INFO_BYTES: Final = 136
_BYTES_RECEIVED: Final = struct.Struct("@Q")
_BYTES_RECEIVED_AT: Final = 128
"""Offset of ``tcpi_bytes_received`` in ``struct tcp_info``; in every Linux since 4.1."""


class _Connection:
    """One accepted connection."""

    __slots__ = ("cut", "handled", "heard_s", "inode", "memory", "since_s", "strikes", "told", "unfinished")

    def __init__(self, inode: int, now_s: float, memory: int) -> None:
        self.inode = inode
        self.since_s = now_s
        self.heard_s = 0.0
        """Of its last whole message, as far as the scans know; 0 before the first."""
        self.handled = 0
        """Bytes of the whole messages that came by it, as they travelled."""
        self.unfinished = 0
        """Bytes that it received beyond those: in ZeroMQ, and nobody can see them."""
        self.memory = memory
        """Of the process, at the scan that saw its last whole message."""
        self.strikes = 0
        self.cut = False
        """Shut down; ZeroMQ may still have to notice."""
        self.told = b""
        """Whose key it came with."""


class Connections:
    """Connections of one bound socket.

    Call ``arrived`` for each message and ``look`` every ``POLL_INTERVAL_S``, both from one thread.
    """

    def __init__(
        self,
        limits: TransportLimits,
        *,
        may_stay: Callable[[bytes], bool] = bool,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """``may_stay``: whether connections with that key may; those without one may always."""
        self.port = 0
        """Of the bound socket."""
        self._limits = limits
        self._may_stay = may_stay
        self._now_s = now_s
        self._connections: dict[int, _Connection] = {}
        self._others: dict[int, int] = {}
        """Sockets that are none of these: inode by descriptor."""
        self._heard: dict[int, bytes] = {}
        """Keys of those by which a message came since the last scan, by descriptor."""
        self._handled: dict[int, int] = {}
        """Bytes of these messages."""
        self._statm = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        """Kept open: it is needed when no file can be opened any more."""
        self._memory = private_bytes(self._statm)
        self._next_scan_s = 0.0
        self._looked_s = now_s()
        self._most = most_connections(limits)
        self._lines = 0
        self.cut = 0
        """Connections that were shut down."""

    def arrived(self, descriptor: int, key: bytes, nbytes: int) -> None:
        """A whole message of so many bytes on the wire came by this connection, with that key."""
        self._heard[descriptor] = key
        self._handled[descriptor] = self._handled.get(descriptor, 0) + nbytes

    def look(self) -> None:
        """Scan when it is time, or when memory has grown."""
        memory, now_s = private_bytes(self._statm), self._now_s()
        if (late_s := now_s - self._looked_s) > SCAN_S:  # proves nothing: what came meanwhile may lie unread
            self._forgive(late_s)
        self._looked_s = now_s
        grown = memory - self._memory >= GROWTH_BYTES or lowest_free(self._statm) > self._most
        if now_s < self._next_scan_s and not grown:
            self._memory = min(self._memory, memory)
            return
        self.scan()

    def _forgive(self, late_s: float) -> None:
        for connection in self._connections.values():
            connection.since_s += late_s
            connection.heard_s += late_s if connection.heard_s else 0.0

    def scan(self) -> None:
        """Look at every connection now, and cut those that are too much."""
        now_s, self._memory = self._now_s(), private_bytes(self._statm)
        self._next_scan_s = now_s + SCAN_S
        self._scan(now_s, self._memory)

    def unfinished(self) -> list[int]:
        """Bytes that each connection held at the last scan."""
        return [connection.unfinished for connection in self._connections.values()]

    def close(self) -> None:
        """Look no more. May be called again."""
        if self._statm >= 0:
            os.close(self._statm)
            self._statm = -1

    def _scan(self, now_s: float, memory: int) -> None:
        self._lines = 0
        seen = dict(self._descriptors(now_s, memory))
        self._connections = seen
        for descriptor, connection in seen.items():
            self._measure(descriptor, connection, now_s, memory)
        self._heard.clear()
        self._handled.clear()
        for descriptor, why in list(self._offenders(now_s)):
            self._cut(descriptor, why)
        self._cut_most({d: c for d, c in seen.items() if not c.cut}, memory)
        if self._lines > MAX_LINES:
            log.warning("and %d more connections are cut", self._lines - MAX_LINES)

    def _descriptors(self, now_s: float, memory: int) -> Iterator[tuple[int, _Connection]]:
        """The accepted connections of this port, known ones as they were."""
        for descriptor in open_files():
            try:
                found = os.fstat(descriptor)
            except OSError:
                continue
            if not stat.S_ISSOCK(found.st_mode) or self._others.get(descriptor) == found.st_ino:
                continue
            known = self._connections.get(descriptor)
            if known is not None and known.inode == found.st_ino:
                yield descriptor, known
            elif self._is_mine(descriptor):
                yield descriptor, _Connection(found.st_ino, now_s, memory)
            else:
                self._others[descriptor] = found.st_ino

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
        if descriptor in self._heard:
            connection.told = self._heard[descriptor]
            connection.heard_s, connection.memory = now_s, memory
            connection.strikes = 0
            connection.handled = min(connection.handled + self._handled[descriptor], received)
        connection.unfinished = received - connection.handled

    def _offenders(self, now_s: float) -> Iterator[tuple[int, str]]:
        """What is too much of one connection."""
        limits = self._limits
        for descriptor, connection in self._connections.items():
            if connection.cut:
                continue
            if connection.unfinished > limits.max_message_bytes + FRAMING_BYTES:
                yield descriptor, f"it sent {connection.unfinished} bytes that are no whole message"
            elif connection.told and not self._may_stay(connection.told):
                yield descriptor, "its key is not allowed any more"
            elif now_s - (connection.heard_s or connection.since_s) > limits.idle_s:
                yield descriptor, f"it said nothing for {limits.idle_s:g} s"
            elif not connection.heard_s and connection.unfinished > STRANGER_BYTES:
                connection.strikes += 1
                self._next_scan_s = 0.0
                if connection.strikes > 1:
                    yield descriptor, f"it sent {connection.unfinished} bytes before its first message"

    def _cut_most(self, connections: dict[int, _Connection], memory: int) -> None:
        """What is too much of all together; the silent and the greedy go first."""
        limits = self._limits
        order = sorted(connections, key=lambda d: (connections[d].heard_s > 0, connections[d].since_s))
        for descriptor in order[: max(len(order) - self._most, 0)]:
            self._cut(descriptor, f"there are more than {self._most} connections")
            del connections[descriptor]
        total = sum(connection.unfinished for connection in self._connections.values())  # cut ones hold it for a while
        for descriptor in sorted(connections, key=lambda d: connections[d].unfinished, reverse=True):
            connection = connections[descriptor]
            if connection.unfinished <= STRANGER_BYTES:
                return
            swollen = memory - connection.memory > limits.max_growth_bytes + 2 * total
            if total > limits.max_unfinished_bytes or swollen:
                self._cut(descriptor, f"unfinished messages hold {max(total, memory - connection.memory)} bytes")
                total -= 0 if swollen else connection.unfinished

    def _cut(self, descriptor: int, why: str) -> None:
        """ZeroMQ sees the end of the connection, forgets what it held of it and closes the descriptor."""
        try:
            with borrowed(descriptor) as connection:
                peer = connection.getpeername()
                connection.shutdown(socket.SHUT_RDWR)
        except OSError:  # it has ended by itself
            return
        self._connections[descriptor].cut = True
        self.cut += 1
        self._lines += 1
        if self._lines <= MAX_LINES:
            log.warning("connection of %s:%d is cut: %s", peer[0], peer[1], why)


def wire_bytes(sizes: list[int], added: int = 0) -> int:
    """What frames of these sizes are on the wire (ZMTP 3); ``added``: to each, by encryption."""
    return sum(size + added + (2 if size + added <= SHORT_BYTES else 9) for size in sizes)


@contextmanager
def borrowed(descriptor: int) -> Generator[socket.socket]:
    """A socket object for a descriptor that ZeroMQ owns and closes."""
    found = socket.socket(fileno=descriptor)
    try:
        yield found
    finally:
        found.detach()


def received_bytes(descriptor: int) -> int:
    """What the kernel has received by this connection; 0 when it is gone."""
    try:
        with borrowed(descriptor) as connection:
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    except OSError:
        return 0
    return int(_BYTES_RECEIVED.unpack_from(info, _BYTES_RECEIVED_AT)[0])


def most_connections(limits: TransportLimits) -> int:
    """The limit, or less where the process may not open as many files."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return limits.max_connections
    return min(limits.max_connections, max(files - SPARE_FILES, files // 2))


def lowest_free(open_file: int) -> int:
    """The descriptor that the next file would get: at least as many are open. The limit when there is none."""
    try:
        found = os.dup(open_file)
    except OSError:
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    os.close(found)
    return found


def open_files() -> Iterable[int]:
    """Descriptors that may be open; all that there can be when none is left to look."""
    try:
        return [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError:
        return range(resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def private_bytes(statm: int) -> int:
    """Resident memory of this process that no file backs. ``statm``: its /proc/self/statm, open."""
    fields = os.pread(statm, 128, 0).split()
    return (int(fields[1]) - int(fields[2])) * _PAGE
