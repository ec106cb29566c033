# pyright: basic, reportMissingImports=false
"""Client of OpenEnv servers: a WebSocket for each session, and HTTP for the schemas and the tasks of a server.

OpenEnv's own client reconnects if a socket is lost, and its next step is in another session, which was never reset.
Here a lost session is an error. Only the server needs the package ``openenv``.
"""

import asyncio
import contextlib
import json
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import quote, urlsplit
from urllib.request import ProxyHandler, Request, build_opener

import msgspec

try:
    from websockets.asyncio.client import ClientConnection, connect
    from websockets.exceptions import ConnectionClosed, WebSocketException
except ImportError as error:
    raise ImportError(f"{error}; environments of OpenEnv need it: pip install websockets") from error

MAX_BYTES = 16 << 20
"""Maximum size of one message or body of a server."""

CLOSE_TIMEOUT_S = 2.0
"""Maximum seconds of the closing handshake. The server ends a session whose socket is lost, too."""

CONNECT_TIMEOUT_S = 10.0
"""Maximum seconds of opening a socket, and of a request over HTTP."""

FULL = "CAPACITY_REACHED"
"""Code of a server's refusal of one more session."""


class Result(msgspec.Struct):
    """The reply to a reset or a step."""

    observation: dict[str, Any] = {}
    reward: bool | float | None = None
    done: bool = False


class Reply(msgspec.Struct):
    """A message of the server."""

    type: str
    data: dict[str, Any] = {}


class ServerError(Exception):
    """A server does not reply in time, or refuses a message with a ``code``."""

    def __init__(self, url: str, message: str, code: str = "") -> None:
        super().__init__(f"{url}: {message}")
        self.code = code


class Unavailable(ServerError):
    """A server cannot be reached, has no free session, or closed one."""


class Session:
    """One session of an environment. Its requests are sequential."""

    def __init__(self, url: str, socket: ClientConnection, timeout_s: float) -> None:
        self.url = url
        self._socket, self._timeout_s = socket, timeout_s

    @classmethod
    async def begin(cls, url: str, arguments: dict[str, Any], timeout_s: float) -> tuple["Session", Result]:
        """Connect to a server and reset its environment. ``timeout_s``: maximum seconds of a reset or step."""
        try:
            socket = await connect(
                f"ws{url.removeprefix('http')}/ws",
                open_timeout=CONNECT_TIMEOUT_S,
                close_timeout=CLOSE_TIMEOUT_S,
                ping_interval=None,  # each request has a limit, and a busy server may answer pings late
                max_size=MAX_BYTES,
                proxy=None,
            )
        except (OSError, WebSocketException) as error:
            raise Unavailable(url, f"no session ({error})") from error
        session = cls(url, socket, timeout_s)
        try:
            return session, await session._request("reset", arguments)
        except BaseException:
            await session.close()
            raise

    async def step(self, action: dict[str, Any]) -> Result:
        """Take an action. ``ServerError`` has the code VALIDATION_ERROR if its fields do not fit the environment's."""
        return await self._request("step", action)

    async def close(self) -> None:
        """End the session."""
        await self._socket.close()

    async def _request(self, kind: str, data: dict[str, Any]) -> Result:
        message = json.dumps({"type": kind, "data": data})
        try:
            async with asyncio.timeout(self._timeout_s):
                with contextlib.suppress(ConnectionClosed):  # the reason may be in a message that it sent before
                    await self._socket.send(message)
                received = await self._socket.recv()
        except TimeoutError as error:
            raise ServerError(self.url, f"no reply to {kind} within {self._timeout_s:g} s") from error
        except ConnectionClosed as error:
            raise Unavailable(self.url, f"it ended the session instead of a reply to {kind} ({error})") from error
        try:
            reply = msgspec.json.decode(received, type=Reply)
            if reply.type == "error":
                raise self._refusal(kind, reply.data)
            return msgspec.convert(reply.data, Result)
        except msgspec.MsgspecError as error:
            raise ServerError(self.url, f"its reply to {kind} is not one of OpenEnv ({error})") from error

    def _refusal(self, kind: str, data: dict[str, Any]) -> ServerError:
        code = str(data.get("code", ""))
        causes = "; ".join(str(each.get("msg", "")) for each in data.get("errors", []))
        message = f"it answered {kind} with {code}: {data.get('message', '')}{causes and f' ({causes})'}"
        return (Unavailable if code == FULL else ServerError)(self.url, message, code)


class Server:
    """The descriptions that a server serves over HTTP. Calls block."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._opener = build_opener(ProxyHandler({}))

    def schemas(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the JSON schemas of an action and of an observation."""
        reply = self._json("/schema")
        try:
            return dict(reply["action"]), dict(reply["observation"])
        except (KeyError, TypeError, ValueError) as error:
            raise ServerError(self._url, "it is no OpenEnv server; /schema has no action and observation") from error

    def num_tasks(self, split: str) -> int:
        """Return the number of tasks of a split. Environments may have none."""
        try:
            (name,) = self._json("/list_environments")
            return int(self._json(f"/{quote(name, safe='')}/num_tasks", {"split": split})["num_tasks"])
        except (KeyError, TypeError, ValueError) as error:
            raise ServerError(self._url, "it does not count its tasks as OpenEnv does") from error

    def _json(self, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = Request(self._url + path, data=data, headers={"Content-Type": "application/json"})
        try:
            with self._opener.open(request, timeout=CONNECT_TIMEOUT_S) as response:
                return json.loads(response.read(MAX_BYTES))
        except HTTPError as error:
            error.close()
            raise ServerError(self._url, f"{path}: {error}") from error
        except (OSError, HTTPException) as error:
            cause = error.reason if isinstance(error, URLError) else error
            raise ServerError(self._url, f"{path}: {cause}") from error
        except ValueError as error:
            raise ServerError(self._url, f"it is no OpenEnv server; {path} is no JSON") from error


def base_urls(value: str | list[str], key: str) -> list[str]:
    """Return the URLs without slashes at their ends. ``ValueError`` names ``key`` if one is wrong."""
    urls: list[Any] = value if isinstance(value, list) else [value]
    for url in urls:
        parts = urlsplit(url) if isinstance(url, str) else None
        if parts is None or parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{key}={url!r}; it must be http://HOST:PORT or https://HOST, or a list of them")
    if not urls:
        raise ValueError(f"{key}=[]; it must have at least one URL")
    return [url.rstrip("/") for url in urls]
