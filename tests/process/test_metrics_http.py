"""The metrics endpoint serves metrics to any reader, rejects every other request, and limits slow readers."""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import pytest

from staleflow.configs.errors import ConfigError
from staleflow.configs.metrics import read_token
from staleflow.process import metrics_http as scrape
from staleflow.process.metrics_http import MAX_CONNECTIONS, ScrapeServer

TOKEN = "0123456789abcdef"
MUCH = 8_000_000
"""Size in bytes: more than the system buffers for a connection."""


async def text() -> bytes:
    return b"staleflow_finished 0\n"


@pytest.fixture
async def server() -> AsyncIterator[ScrapeServer]:
    made = ScrapeServer("http://127.0.0.1:0", text, token=TOKEN)
    await made.start()
    yield made
    await made.close()


async def ask(server: ScrapeServer, request: bytes) -> bytes:
    """Send a request; return all bytes until the server closes the connection."""
    host, port = server.url.removeprefix("http://").removesuffix("/metrics").rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(request)
    answer = await reader.read()
    writer.close()
    return answer


async def rest(reader: socket.socket) -> bytes:
    """Read the remaining bytes of a non-blocking socket."""
    found = bytearray()
    with suppress(ConnectionResetError):
        while part := await asyncio.get_running_loop().sock_recv(reader, 1 << 16):
            found += part
    return bytes(found)


def get(path: str = "/metrics", token: str = TOKEN, method: str = "GET") -> bytes:
    bearer = f"Authorization: Bearer {token}\r\n" if token else ""
    return f"{method} {path} HTTP/1.1\r\nHost: h\r\n{bearer}\r\n".encode()


async def test_the_metrics_are_read_by_who_bears_the_token(server: ScrapeServer) -> None:
    head, _, body = (await ask(server, get())).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    assert b"content-type: text/plain; version=0.0.4" in head
    assert body == b"staleflow_finished 0\n"
    assert (await ask(server, get("/metrics?x=1"))).startswith(b"HTTP/1.1 200")
    assert (await ask(server, get(method="HEAD"))).endswith(b"\r\n\r\n")


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [(get(token=""), 401), (get(token="0123456789abcdeX"), 401), (get("/"), 404), (get(method="POST"), 405)],
)
async def test_nobody_gets_anything_else(server: ScrapeServer, request_bytes: bytes, status: int) -> None:
    assert (await ask(server, request_bytes)).startswith(f"HTTP/1.1 {status}".encode())


@pytest.mark.parametrize(
    "rubbish", [b"\x00\xff" * 10_000, b"GET " + b"x" * 20_000, b"\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n"]
)
async def test_what_is_not_http_is_let_go_and_the_next_one_is_served(server: ScrapeServer, rubbish: bytes) -> None:
    with suppress(ConnectionError):  # the server may close the connection in the middle of the rubbish
        assert b"200" not in await ask(server, rubbish)
    assert b"200 " in await ask(server, get())


async def test_who_says_nothing_is_let_go_and_few_may_try_at_once(
    server: ScrapeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scrape, "EXCHANGE_TIMEOUT_S", 3.0)
    silent = [asyncio.create_task(ask(server, b"GET")) for _ in range(MAX_CONNECTIONS)]
    await asyncio.sleep(0)
    async with asyncio.timeout(60):
        while True:  # loop from when all places are taken until some are free again
            with_places = await asyncio.gather(ask(server, get()), return_exceptions=True)
            if isinstance(with_places[0], bytes) and with_places[0].startswith(b"HTTP/1.1 200"):
                break
            await asyncio.sleep(0.05)
        assert await asyncio.gather(*silent) == [b""] * MAX_CONNECTIONS


async def test_who_reads_nothing_of_a_long_answer_is_let_go_with_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def much() -> bytes:
        return bytes(MUCH)

    monkeypatch.setattr(scrape, "EXCHANGE_TIMEOUT_S", 5.0)
    caplog.set_level(logging.DEBUG, logger=scrape.__name__)
    made = ScrapeServer("http://127.0.0.1:0", much)
    await made.start()
    host, port = made.url.removeprefix("http://").removesuffix("/metrics").rsplit(":", 1)
    async with AsyncExitStack() as readers:
        readers.push_async_callback(made.close)
        idle = [readers.enter_context(socket.socket()) for _ in range(MAX_CONNECTIONS)]
        for reader in idle:
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            reader.connect((host, int(port)))
            reader.send(get())
            reader.setblocking(False)
        async with asyncio.timeout(60):
            while caplog.text.count("metrics connection closed") < MAX_CONNECTIONS:  # noqa: ASYNC110 the log is the only signal
                await asyncio.sleep(0.01)
            left = [len(await rest(reader)) for reader in idle]
        assert 0 < max(left) < MUCH  # only the bytes that the system had buffered arrive


async def test_a_long_answer_reaches_who_reads_it() -> None:
    async def much() -> bytes:
        return b"x" * MUCH

    made = ScrapeServer("http://127.0.0.1:0", much)
    await made.start()
    assert (await ask(made, get())).endswith(b"\r\n\r\n" + await much())
    await made.close()


async def test_a_defect_costs_one_answer_and_not_the_loop() -> None:
    async def broken() -> bytes:
        raise RuntimeError("a defect")

    ended: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: ended.append(context))
    made = ScrapeServer("http://127.0.0.1:0", broken)
    await made.start()
    assert await ask(made, get()) == b""
    assert await ask(made, get()) == b""
    await made.close()
    assert ended == []


async def test_an_address_that_is_taken_or_too_wide_is_one_line(server: ScrapeServer) -> None:
    taken = server.url.removesuffix("/metrics")
    with pytest.raises(ConfigError, match=f'metrics.bind is "{taken}"; the system refuses it'):
        await ScrapeServer(taken, text).start()
    with pytest.raises(ConfigError, match="loopback"):
        ScrapeServer("http://0.0.0.0:0", text)
    ScrapeServer("http://0.0.0.0:0", text, wide=True)


def test_a_token_is_one_long_word_that_nobody_else_may_read(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    file.chmod(0o600)
    assert read_token(str(file)) == TOKEN
    assert read_token("") == ""
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="its mode must be 0600"):
        read_token(str(file))
    file.chmod(0o600)
    file.write_text("short")
    with pytest.raises(ConfigError, match="one word of at least 16 characters"):
        read_token(str(file))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_token(str(tmp_path / "none"))
