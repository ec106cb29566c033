"""Poll the status of a server in a thread, so that readers never block, and follow ``metrics.jsonl``."""

import contextlib
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

from staleflow.clients.admin import Admin
from staleflow.configs.errors import ConfigError
from staleflow.metrics.reader import parsed
from staleflow.net.errors import Refused, Unavailable
from staleflow.net.transport import SOCKETS, Transport
from staleflow.protocols.wire.messages import Status

S = TypeVar("S", bound=Status)


class StatusWatch(Generic[S]):
    """Thread that polls the status of a server of one kind; ``newest`` is the last reply."""

    def __init__(self, kind: type[S], address: str, every_s: float = 0.5, *, transport: Transport = SOCKETS) -> None:
        self._kind = kind
        self._admin = Admin(address, "supervisor", transport=transport)
        self._every_s = every_s
        self._stop = threading.Event()
        self._answer: tuple[float, S | None] = (0.0, None)
        self._error: ConfigError | None = None
        self._thread = threading.Thread(target=self._poll, name="status", daemon=True)

    def __enter__(self) -> "StatusWatch[S]":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._admin.close()
        self._thread.join(timeout=2.0)

    @property
    def newest(self) -> S | None:
        """The last reply, None before the first.

        Raise ``ConfigError`` if the run uses another staleflow version, or the server is of another kind.
        """
        if self._error is not None:
            raise self._error
        return self._answer[1]

    @property
    def age_s(self) -> float:
        """Seconds since the last reply; 0 before the first."""
        received_s, status = self._answer
        return 0.0 if status is None else time.monotonic() - received_s

    def poll_now(self) -> None:
        """Poll once in the calling thread; keep the previous reply if the server does not answer within a second."""
        with contextlib.suppress(Unavailable, Refused):
            self._answer = (time.monotonic(), self._admin.status_of(self._kind, timeout_s=1.0))

    def _poll(self) -> None:
        try:
            while not self._stop.is_set():
                self.poll_now()
                self._stop.wait(self._every_s)
        except ConfigError as error:
            self._error = error


class Tail:
    """Follow a growing file and return each line once. The file need not exist yet."""

    def __init__(self, path: Path, *, from_end: bool = False) -> None:
        """``from_end``: skip the lines that the file has already."""
        self._path = path
        self._read = path.stat().st_size if from_end and path.exists() else 0

    def take(self) -> bytes:
        """Return the complete lines since the last call. After a read error, a later call returns them."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._read)
                new = file.read()
        except OSError:
            return b""
        whole = new[: new.rfind(b"\n") + 1]
        self._read += len(whole)
        return whole


class NewLines:
    """Follow a growing ``metrics.jsonl`` and return each line once. The file need not exist yet."""

    def __init__(self, path: Path) -> None:
        self._tail = Tail(path)

    def take(self) -> tuple[Mapping[str, Any], ...]:
        """Return the complete lines since the last call, like ``Tail``."""
        return tuple(parsed(self._tail.take().split(b"\n")))
