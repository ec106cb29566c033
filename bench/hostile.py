"""A peer that implements just enough ZMTP 3.0 to attack: handmade greetings, handshakes and frames, over plain TCP."""

import os
import socket
import struct
from typing import Final

from staleflow.protocols.wire.codec import encode_request
from staleflow.protocols.wire.messages import Ping

GREETING: Final = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
_MORE, _LONG, _COMMAND = 1, 2, 4


def frame(data: bytes, *, more: bool = False) -> bytes:
    """One frame as it travels; with ``more`` the message continues."""
    flags = _MORE if more else 0
    if len(data) < 256:
        return bytes((flags, len(data))) + data
    return bytes((flags | _LONG,)) + struct.pack(">Q", len(data)) + data


BIG: Final = frame(bytes(65_536), more=True) * 16
"""A megabyte of an unfinished message."""
TINY: Final = frame(b"", more=True) * 32_768
"""Empty frames of an unfinished message: 64 KiB on the wire, 2 MiB in ZeroMQ."""


class Hostile:
    """One TCP connection to an endpoint at 127.0.0.1."""

    def __init__(self, port: int, *, timeout_s: float = 1.0) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=timeout_s)

    def greet(self) -> None:
        """The handshake of a plain DEALER. ``OSError`` when the server hangs up."""
        self.socket.sendall(GREETING)
        got = b""
        while len(got) < len(GREETING):
            if not (part := self.socket.recv(len(GREETING) - len(got))):
                raise ConnectionResetError
            got += part
        kind, name = _property(b"Socket-Type", b"DEALER"), _property(b"Identity", os.urandom(6).hex().encode())
        ready = b"\x05READY" + kind + name
        self.socket.sendall(bytes((_COMMAND, len(ready))) + ready)

    def ping(self) -> None:
        """One whole message, as an honest client would send it."""
        self.socket.sendall(frame(encode_request(0, Ping())))

    def send(self, data: bytes) -> int:
        """Return the number of bytes sent; ``OSError`` when the server has hung up, or accepts no bytes for a while."""
        self.socket.sendall(data)
        return len(data)

    def is_cut(self) -> bool:
        """Return True if the server has ended this connection; discard the data that it sent before."""
        self.socket.setblocking(False)
        try:
            while self.socket.recv(65_536):
                pass
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    def close(self) -> None:
        self.socket.close()


def _property(name: bytes, value: bytes) -> bytes:
    return bytes((len(name),)) + name + struct.pack(">I", len(value)) + value
