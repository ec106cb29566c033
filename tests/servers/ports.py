"""Ports for servers in other processes, reserved before those servers start."""

import socket


class ReservedPort:
    """A port of loopback, kept for one server until ``close``.

    The socket is bound and never listens. Linux then assigns the port to no process that requests any free port, lets a
    server with SO_REUSEADDR bind it as often as that server restarts, and refuses connections in between.
    """

    def __init__(self) -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(("127.0.0.1", 0))
        self.number: int = self._socket.getsockname()[1]

    def close(self) -> None:
        self._socket.close()
