"""Named objects below a URL: an S3 bucket, or a shared folder. Reads and writes run in the threads of ``obstore``.

Endpoint, region and credentials come from the environment of the process (``AWS_ENDPOINT_URL``, ``AWS_REGION``,
``AWS_ACCESS_KEY_ID``, ...) or from the role of the machine, never from the configuration. Each put is atomic.
"""

import asyncio
import re
import secrets
import shutil
from collections.abc import Coroutine, Iterable
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from staleflow.configs.errors import ConfigError
from staleflow.configs.loading.extras import install
from staleflow.configs.rules.mirror import check_store_url

if TYPE_CHECKING:
    from collections.abc import Generator

    from obstore.store import ObjectStore

    from staleflow.protocols.wire.codec import Data

S3 = install("s3")
CONNECT_TIMEOUT = "5s"
REQUEST_TIMEOUT = "60s"
"""Limit of one request with its body, such as a part of a version."""
MAX_RETRIES = 2
RETRY_TIMEOUT_S = 60.0
MAX_READ_BYTES = 64 << 20
"""Maximum size of an object that is read: a part of a version, or a manifest."""
LANES = 4
"""Transfers in flight at once."""

_CODE = re.compile(r"<Code>(\w+)</Code>")


class StoreError(Exception):
    """The object store failed or did not answer in time. ``str`` is one line, without credentials."""


class NoObject(StoreError):
    """The object does not exist."""


class NoAccess(StoreError):
    """The bucket does not exist, or the credentials do not permit the operation: a retry does not help."""


class Objects:
    """Objects below ``url``. Every method raises ``StoreError``."""

    def __init__(self, url: str) -> None:
        """Raise ``ConfigError`` if the URL is invalid or the package ``obstore`` is missing. Nothing is contacted."""
        check_store_url("url", url)
        try:
            import obstore
        except ImportError:
            raise ConfigError("url", url, f"the package obstore is not installed: {S3}") from None
        self.url = url.rstrip("/")
        self._api: Any = obstore  # its lists are generic in a type of another package
        self._opened: ObjectStore | None = None

    @property
    def _store(self) -> "ObjectStore":
        """The store; opened at the first use, because opening a folder creates it."""
        if self._opened is None:
            self._opened = _open(self.url)
        return self._opened

    async def get(self, name: str) -> memoryview:
        """Return the bytes of an object. Raise ``NoObject`` if it does not exist, ``StoreError`` if it is too large for
        an object of a mirror: it is not read then."""
        with self._errors(name):
            reply = await self._api.get_async(self._store, name)
            if (nbytes := reply.meta["size"]) <= MAX_READ_BYTES:
                return memoryview(await reply.bytes_async())
        raise StoreError(f"{self.url}/{name} has {nbytes} bytes; at most {MAX_READ_BYTES} are read")

    async def put(self, name: str, data: "Data") -> None:
        """Create or replace an object: readers see the old bytes or the new ones."""
        with self._errors(name):
            # Multipart uploads are off: those of a killed process stay in the bucket, invisible to a listing, and cost.
            await self._api.put_async(self._store, name, data, use_multipart=False)

    async def sizes(self, folder: str = "") -> dict[str, int]:
        """Return the size of every object below ``folder``, by name."""
        with self._errors(folder):
            listed: list[dict[str, Any]] = await self._api.list(self._store, folder or None).collect_async()
            return {entry["path"]: entry["size"] for entry in listed}

    async def folders(self) -> list[str]:
        """Return the names of the folders directly below the URL."""
        with self._errors(""):
            listed = await self._api.list_with_delimiter_async(self._store)
            return sorted(listed["common_prefixes"])

    async def delete(self, name: str) -> None:
        """Delete an object, if it exists."""
        with suppress(NoObject), self._errors(name):
            await self._api.delete_async(self._store, name)

    async def delete_folder(self, folder: str, *, first: str) -> None:
        """Delete all objects below ``folder``, the one with the name ``first`` before the others."""
        await self.delete(f"{folder}/{first}")
        if self.url.startswith("file://"):  # also removes the partial files of a killed process, which are not listed
            with self._errors(folder):
                await asyncio.to_thread(shutil.rmtree, _folder(self.url) / folder, ignore_errors=True)
        elif names := list(await self.sizes(f"{folder}/")):
            with self._errors(folder):
                await self._api.delete_async(self._store, names)

    async def probe(self) -> None:
        """Write, read and delete a small object."""
        name, data = f"probe-{secrets.token_hex(8)}", b"staleflow"
        try:
            await self.put(name, data)
        except NoObject as error:  # a put replies "not found" only if the bucket is missing
            raise NoAccess(str(error)) from error
        await self.get(name)
        await self.delete(name)

    @contextmanager
    def _errors(self, name: str) -> "Generator[None]":
        """Translate the errors of ``obstore``."""
        errors = self._api.exceptions
        try:
            yield
        except (errors.PermissionDeniedError, errors.UnauthenticatedError) as error:
            raise NoAccess(self._line(name, error)) from error
        except FileNotFoundError as error:
            line = self._line(name, error)
            raise (NoAccess if "NoSuchBucket" in line else NoObject)(line) from error
        except Exception as error:  # whatever a library raises must not end the server
            line = self._line(name, error)
            refused = any(code in line for code in ("AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch"))
            raise (NoAccess if refused or "NoSuchBucket" in line else StoreError)(line) from error

    def _line(self, name: str, error: Exception) -> str:
        """Return a message of one line: the rest of the store's message may name keys."""
        text = str(error)
        code = _CODE.search(text)
        first, *_ = text.splitlines() or [""]
        reason = code.group(1) if code else first.rpartition(" - ")[2].strip() or type(error).__name__
        return f"{self.url}/{name}: {reason}"


def _open(url: str) -> "ObjectStore":
    from obstore.store import LocalStore, S3Store

    if url.startswith("file://"):
        return LocalStore(_folder(url), mkdir=True)
    return S3Store.from_url(
        url,
        # The endpoint is the operator's choice; without one it is https.
        client_options={"allow_http": True, "connect_timeout": CONNECT_TIMEOUT, "timeout": REQUEST_TIMEOUT},
        retry_config={"max_retries": MAX_RETRIES, "retry_timeout": timedelta(seconds=RETRY_TIMEOUT_S)},
    )


def _folder(url: str) -> Path:
    return Path(unquote(urlsplit(url).path))


async def at_once(work: Iterable[Coroutine[Any, Any, None]], lanes: int = LANES) -> None:
    """Run all coroutines, ``lanes`` at once. The first error cancels the rest."""
    waiting = iter(work)

    async def lane() -> None:
        for step in waiting:
            await step

    running = [asyncio.ensure_future(lane()) for _ in range(lanes)]
    try:
        await asyncio.gather(*running)
    finally:
        for task in running:
            task.cancel()
        await asyncio.wait(running)
