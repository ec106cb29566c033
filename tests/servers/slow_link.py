"""A slow link to a server of this host."""

import asyncio
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress

AT_ONCE_BYTES = 16 << 10
BUFFER_BYTES = 64 << 10
"""Buffer size of each socket; further bytes stay with the sender until the link is free."""


class SlowLink:
    """Forward each connection to a server's Unix socket at a limited rate in each direction."""

    def __init__(self, server: str, bytes_per_s: float) -> None:
        self._path = server.removeprefix("ipc://")
        self.bytes_per_s = bytes_per_s
        self.address = ""
        self.carried = 0
        """Bytes carried in both directions."""

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward one connection until either side closes it."""
        there = socket.socket(socket.AF_UNIX)
        there.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
        there.connect(self._path)
        theirs, to = await asyncio.open_unix_connection(sock=there, limit=AT_ONCE_BYTES)
        ways = [asyncio.ensure_future(self._one_way(*way)) for way in ((reader, to), (theirs, writer))]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            for end in (writer, to):
                end.transport.abort()

    async def _one_way(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        free_s, clock = 0.0, asyncio.get_running_loop().time
        with suppress(ConnectionError):
            while data := await reader.read(AT_ONCE_BYTES):
                free_s = max(free_s, clock()) + len(data) / self.bytes_per_s
                await asyncio.sleep(free_s - clock())
                self.carried += len(data)
                writer.write(data)
                await writer.drain()


@asynccontextmanager
async def slow_link(server: str, bytes_per_s: float) -> AsyncGenerator[SlowLink]:
    """Yield a link; clients connect to its ``address``."""
    link = SlowLink(server, bytes_per_s)
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
    listening.bind(("127.0.0.1", 0))
    serving = await asyncio.start_server(link.carry, sock=listening, limit=AT_ONCE_BYTES)
    link.address = f"tcp://127.0.0.1:{listening.getsockname()[1]}"
    try:
        yield link
    finally:
        serving.close()
