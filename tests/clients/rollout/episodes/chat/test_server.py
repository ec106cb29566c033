"""The HTTP server of the episodes answers plain sockets and urllib."""

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from staleflow.clients.rollout.episodes.chat import server as chat_server
from staleflow.clients.rollout.episodes.chat.apis.events import EventStream
from staleflow.clients.rollout.episodes.chat.connection import CHUNK, MAX_BODY_BYTES
from staleflow.clients.rollout.episodes.chat.refusal import ChatRefused
from staleflow.clients.rollout.episodes.chat.server import ChatServer
from staleflow.configs.errors import ConfigError
from tests.clients.rollout.engines.waiting import until


@asynccontextmanager
async def serving() -> AsyncGenerator[ChatServer]:
    server = ChatServer()
    await server.start()
    try:
        yield server
    finally:
        await server.close()


async def echo(route: str, body: object) -> dict[str, Any]:
    if body == {"break": True}:
        raise RuntimeError("a bug")
    if body == {"refuse": True}:
        raise ChatRefused("not so", "because", param="refuse")
    return {"route": route, "body": body}


async def ask(server: ChatServer, path: str, key: str, data: bytes, method: str = "POST") -> tuple[int, dict[str, Any]]:
    def blocking() -> tuple[int, dict[str, Any]]:
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        request = urllib.request.Request(server.base_url + path, data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as reply:
                return reply.status, json.load(reply)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)

    return await asyncio.to_thread(blocking)


async def test_a_key_finds_its_episode_and_is_unknown_once_that_is_over() -> None:
    async with serving() as server:
        key = server.open(echo)
        assert server.base_url.startswith("http://127.0.0.1:")
        asked = await ask(server, "/chat/completions", key, b'{"a": "\xc3\xa9"}')
        assert asked == (200, {"route": "/chat/completions", "body": {"a": "é"}})
        assert (await ask(server, "/completions?x=1", key, b"[]"))[1] == {"route": "/completions", "body": []}
        for wrong in ("", "episode-0", key[:-1]):
            assert (await ask(server, "/completions", wrong, b"{}"))[0] == 401
        server.end(key)
        status, body = await ask(server, "/completions", key, b"{}")
        assert (status, body["error"]["code"]) == (401, "invalid_api_key")


@pytest.mark.parametrize(
    ("path", "method", "data", "status", "code"),
    [
        ("/embeddings", "POST", b"{}", 404, "not_found"),
        ("/models", "POST", b"{}", 405, "method"),
        ("/completions", "PUT", b"{}", 405, "method"),
        ("/completions", "POST", b"{", 400, "malformed"),
        ("/completions", "POST", b'{"refuse": true}', 400, "because"),
        ("/completions", "POST", b'{"break": true}', 500, "internal"),
        ("/completions", "POST", b" " * (33 << 20), 413, "too_large"),
    ],
)
async def test_what_is_wrong_with_a_call_is_an_error_in_the_shape_of_the_openai_calls(
    path: str, method: str, data: bytes, status: int, code: str
) -> None:
    async with serving() as server:
        key = server.open(echo)
        try:
            found, body = await ask(server, path, key, data, method)
        except (urllib.error.URLError, ConnectionError):
            assert status == 413  # the server may refuse while the client still sends
        else:
            assert (found, body["error"]["code"]) == (status, code)
            assert sorted(body["error"]) == ["code", "message", "param", "type"]
        assert (await ask(server, "/completions", key, b"{}"))[0] == 200


async def test_a_connection_carries_one_call_after_the_other() -> None:
    async with serving() as server:
        key = server.open(echo)
        reader, writer = await asyncio.open_connection("127.0.0.1", int(server.base_url.split(":")[2].split("/")[0]))
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n"
        for number in range(3):
            body = json.dumps({"number": number})
            writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
            answered = await reader.readuntil(b"}}")
            assert b"HTTP/1.1 200" in answered
            assert f'"number": {number}'.encode() in answered
        writer.close()


async def test_two_calls_in_one_write_are_both_answered() -> None:
    """The first request fills one read exactly, so the second is already buffered when the server answers the first."""
    async with serving() as server:
        key = server.open(echo)
        reader, writer = await asyncio.open_connection("127.0.0.1", int(server.base_url.split(":")[2].split("/")[0]))
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n"
        room = CHUNK - len(f"{head}Content-Length: 12345\r\n\r\n")
        first = f'{head}Content-Length: {room}\r\n\r\n{{"number": 0}}'.ljust(CHUNK)
        writer.write(f'{first}{head}Content-Length: 13\r\n\r\n{{"number": 1}}'.encode())
        for number in range(2):
            answered = await asyncio.wait_for(reader.readuntil(b"}}"), 60)
            assert f'"number": {number}'.encode() in answered
        writer.close()


async def test_what_is_no_http_costs_its_connection_only() -> None:
    async with serving() as server:
        port = int(server.base_url.split(":")[2].split("/")[0])
        for rubbish in (b"\0\1\2\3\r\n\r\n", b"GET", b"x" * 200_000):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(rubbish)
            writer.write_eof()
            with suppress(ConnectionError):
                assert b"200" not in await reader.read()
            writer.close()
        assert (await ask(server, "/completions", server.open(echo), b"{}"))[0] == 200


async def test_a_client_that_goes_away_ends_its_call() -> None:
    async with serving() as server:
        began, ended = asyncio.Event(), asyncio.Event()

        async def wait(route: str, body: object) -> dict[str, Any]:
            began.set()
            try:
                await asyncio.sleep(3600)
            finally:
                ended.set()
            return {}

        key = server.open(wait)
        _, writer = await asyncio.open_connection("127.0.0.1", int(server.base_url.split(":")[2].split("/")[0]))
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nContent-Length: 2\r\n\r\n{{}}"
        )
        writer.write(head.encode())
        await asyncio.wait_for(began.wait(), 60)
        writer.close()
        await until(ended.is_set)


Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def connected(server: ChatServer) -> AsyncGenerator[Stream]:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(server.base_url.split(":")[2].split("/")[0]))
    try:
        yield reader, writer
    finally:
        writer.close()


def head(key: str, nbytes: int) -> bytes:
    return (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nContent-Length: {nbytes}\r\n\r\n"
    ).encode()


async def rest(reader: asyncio.StreamReader) -> bytes:
    """Read until the end of the connection, which the server must close."""
    try:
        return await asyncio.wait_for(reader.read(), 30)
    except ConnectionError:  # the server closed it before the test wrote
        return b""


async def test_a_stranger_is_refused_before_its_body_is_read() -> None:
    async with serving() as server, connected(server) as (reader, writer):
        writer.write(head("nothing", MAX_BODY_BYTES))
        assert (await rest(reader)).startswith(b"HTTP/1.1 401")
        with suppress(ConnectionError):
            for _ in range(64):
                writer.write(b"x" * (1 << 20))
                await writer.drain()
        await until(lambda: not server._connections)  # pyright: ignore[reportPrivateUsage]


async def test_strangers_are_limited_in_number_and_keep_no_episode_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_server, "MAX_UNAUTHENTICATED", 2)
    async with serving() as server, connected(server) as (mine, to_mine):
        key = server.open(echo)
        to_mine.write(head(key, 2) + b"{}")
        assert b"200" in await mine.readuntil(b"}}")
        async with connected(server) as (first, _), connected(server), connected(server):
            assert await rest(first) == b"", "the oldest goes"
            assert len(server._connections) <= 3  # pyright: ignore[reportPrivateUsage]
            to_mine.write(head(key, 2) + b"{}")
            assert b"200" in await asyncio.wait_for(mine.readuntil(b"}}"), 30)
            assert (await ask(server, "/completions", key, b"{}"))[0] == 200


async def test_a_stranger_has_little_time_for_its_header(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_server, "HEADER_TIMEOUT_S", 0.2)
    async with serving() as server:
        for begun in (b"", b"POST /v1/completions HTTP/1.1\r\n"):
            async with connected(server) as (reader, writer):
                writer.write(begun)
                assert await rest(reader) == b""


async def test_an_episode_that_sends_nothing_more_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_server, "IDLE_TIMEOUT_S", 0.2)
    monkeypatch.setattr(chat_server, "BODY_TIMEOUT_S", 0.2)
    async with serving() as server:
        key = server.open(echo)
        async with connected(server) as (reader, writer):
            writer.write(head(key, 2) + b"{}")
            assert (await rest(reader)).startswith(b"HTTP/1.1 200")
        async with connected(server) as (reader, writer):
            writer.write(head(key, 2) + b"{")
            assert (await rest(reader)).startswith(b"HTTP/1.1 408")


async def test_bodies_of_all_calls_together_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_server, "MAX_BODIES_BYTES", 100)
    async with serving() as server:
        go = asyncio.Event()

        async def wait(route: str, body: object) -> dict[str, Any]:
            await go.wait()
            return {}

        slow, key = server.open(wait), server.open(echo)
        async with connected(server) as (reader, writer):
            writer.write(head(slow, 80) + b"{}".ljust(80))
            await until(lambda: server._bodies_bytes == 80)  # pyright: ignore[reportPrivateUsage]
            status, body = await ask(server, "/completions", key, b"{}".ljust(30))
            assert (status, body["error"]["code"]) == (503, "busy")
            assert (await ask(server, "/completions", key, b"{}"))[0] == 200
            go.set()
            assert b"200" in await asyncio.wait_for(reader.readuntil(b"{}"), 30)
        assert (await ask(server, "/completions", key, b"{}".ljust(30)))[0] == 200
        assert server._bodies_bytes == 0  # pyright: ignore[reportPrivateUsage]


async def test_connections_of_episodes_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_server, "MAX_CONNECTIONS", 1)
    async with serving() as server, connected(server) as (mine, to_mine):
        key = server.open(echo)
        to_mine.write(head(key, 2) + b"{}")
        assert b"200" in await mine.readuntil(b"}}")
        status, body = await ask(server, "/completions", key, b"{}")
        assert (status, body["error"]["code"]) == (503, "busy")
        to_mine.write(head(key, 2) + b"{}")
        assert b"200" in await asyncio.wait_for(mine.readuntil(b"}}"), 30)


async def test_a_key_may_come_in_the_header_of_either_api_and_errors_have_the_shape_of_the_path() -> None:
    async with serving() as server:
        key = server.open(echo)

        def blocking(path: str, headers: dict[str, str]) -> tuple[int, dict[str, Any]]:
            request = urllib.request.Request(server.base_url + path, None, headers)
            try:
                with urllib.request.urlopen(request, timeout=60) as reply:
                    return reply.status, json.load(reply)
            except urllib.error.HTTPError as error:
                with error:
                    return error.code, json.load(error)

        asked = await asyncio.to_thread(blocking, "/models", {"X-Api-Key": key})
        assert asked == (200, {"route": "/models", "body": None})
        for path, kind in (("/messages", "authentication_error"), ("/models", "invalid_request_error")):
            status, body = await asyncio.to_thread(blocking, path, {"X-Api-Key": "x"})
            assert (status, body["error"]["type"]) == (401, kind)


async def test_a_stream_of_events_is_marked_as_one() -> None:
    async def stream(route: str, body: object) -> EventStream:
        return EventStream(b"data: 1\n\n")

    async with serving() as server, connected(server) as (reader, writer):
        writer.write(head(server.open(stream), 2) + b"{}")
        answered = await asyncio.wait_for(reader.readuntil(b"data: 1\n\n"), 30)
        assert b"content-type: text/event-stream" in answered


async def test_workers_of_one_machine_take_ports_one_after_the_other() -> None:
    async with serving() as first:
        port = int(first.base_url.split(":")[2].split("/")[0])
        second = ChatServer("127.0.0.1", port, "agents.example")
        await second.start()
        try:
            where = second.base_url.removeprefix("http://agents.example:").removesuffix("/v1")
            assert port < int(where) < port + chat_server.MAX_PORTS
        finally:
            await second.close()


async def test_a_host_that_cannot_be_bound_and_ports_that_are_all_in_use_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ConfigError, match=r"environment\.host.*192\.0\.2\.1.*must be an address of this machine"):
        await ChatServer("192.0.2.1").start()
    monkeypatch.setattr(chat_server, "MAX_PORTS", 1)
    async with serving() as server:
        port = int(server.base_url.split(":")[2].split("/")[0])
        with pytest.raises(ConfigError, match=rf"environment\.port.*{port}.*in use"):
            await ChatServer("127.0.0.1", port).start()
