"""The client passed to an environment: the calls of ``openai.AsyncOpenAI``, served by this rollout worker's engine.

``await client.chat.completions.create(messages=[...])`` and ``await client.completions.create(prompt=...)`` return
objects of the same shape as there; both fail once the episode is over. ``openai.AsyncOpenAI(base_url=client.base_url,
api_key=client.api_key)`` works as well, and so does ``anthropic.AsyncAnthropic`` with ``client.anthropic_base_url``.
Streams need these packages. ``docs/tutorials/agents.md`` lists the supported arguments.
"""

import asyncio
import json
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import h11

from staleflow.clients.rollout.episodes.chat.routes import BASE, CHAT, COMPLETIONS

CHUNK = 1 << 16


class ChatError(Exception):
    """A rejected call. ``code`` is the reason, as in the body of the reply."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


class EpisodeOver(ChatError):
    """The episode was ended from outside with its tokens so far. Score them and return."""


class Client:
    """The client of one episode. Calls are sequential, and each continues the conversation so far."""

    def __init__(self, base_url: str, api_key: str) -> None:
        self.base_url = base_url
        """``http://HOST:PORT/v1``, as the ``openai`` package expects it."""
        self.anthropic_base_url = base_url.removesuffix(BASE)
        """The same server as the ``anthropic`` package expects it."""
        self.api_key = api_key
        """Valid until the episode is over."""
        self.chat = _Chat(self)
        self.completions = Create(self, COMPLETIONS)

    async def post(self, route: str, arguments: dict[str, Any]) -> Any:
        """Send one call and return the reply as an object. ``ChatError`` if it is rejected."""
        where = urlsplit(self.base_url)
        body = json.dumps(arguments, default=vars).encode()
        headers = [
            ("host", where.netloc),
            ("authorization", f"Bearer {self.api_key}"),
            ("content-type", "application/json"),
            ("content-length", str(len(body))),
            ("connection", "close"),
        ]
        request = h11.Request(method="POST", target=where.path + route, headers=headers)
        reader, writer = await asyncio.open_connection(where.hostname, where.port)
        try:
            status, data = await _exchange(reader, writer, request, body)
        finally:
            writer.close()
        reply = json.loads(data, object_hook=lambda fields: SimpleNamespace(**fields))
        if status != 200:
            kind = EpisodeOver if reply.error.code == "episode_over" else ChatError
            raise kind(status, reply.error.code, reply.error.message)
        return reply


class Create:
    """One kind of call."""

    def __init__(self, client: Client, route: str) -> None:
        self._client, self._route = client, route

    async def create(self, **arguments: Any) -> Any:
        """Send a call with the arguments of the ``openai`` package's ``create``; ``model`` is optional."""
        if arguments.get("stream"):
            raise ValueError("stream is True; this client returns whole answers: use openai.AsyncOpenAI for a stream")
        return await self._client.post(self._route, arguments)


class _Chat:
    def __init__(self, client: Client) -> None:
        self.completions = Create(client, CHAT)


async def _exchange(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: h11.Request, body: bytes
) -> tuple[int, bytes]:
    http = h11.Connection(h11.CLIENT)
    for sent in (request, h11.Data(data=body), h11.EndOfMessage()):
        data: bytes | None = http.send(sent)
        writer.write(data or b"")
    await writer.drain()
    status, parts = 0, list[bytes]()
    while True:
        event: Any = http.next_event()
        if event is h11.NEED_DATA:
            http.receive_data(await reader.read(CHUNK))
        elif isinstance(event, h11.Response):
            status = event.status_code
        elif isinstance(event, h11.Data):
            parts.append(bytes(event.data))
        elif isinstance(event, h11.EndOfMessage):
            return status, b"".join(parts)
        elif not isinstance(event, h11.InformationalResponse):
            raise ConnectionError("the rollout worker closed the connection")
