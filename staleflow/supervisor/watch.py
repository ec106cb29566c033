"""What is new: the scheduler's status, kept at hand so that nobody ever waits for it, and the lines of a file."""

import contextlib
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from staleflow.clients.admin import Admin
from staleflow.configs.errors import ConfigError
from staleflow.metrics.reader import parsed
from staleflow.net.errors import Refused, Unavailable
from staleflow.net.transport import SOCKETS, Transport


class StatusWatch:
    """A thread that asks again and again; ``newest`` is the last answer."""

    def __init__(self, address: str, every_s: float = 0.5, *, transport: Transport = SOCKETS) -> None:
        self._admin = Admin(address, "supervisor", transport=transport)
        self._every_s = every_s
        self._end = threading.Event()
        self._answer: tuple[float, Mapping[str, Any]] = (0.0, {})
        self._wrong: ConfigError | None = None
        self._thread = threading.Thread(target=self._ask, name="status", daemon=True)

    def __enter__(self) -> "StatusWatch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._admin.close()
        self._thread.join(timeout=2.0)

    @property
    def newest(self) -> Mapping[str, Any]:
        """Empty before the first answer. ``ConfigError`` when the run is one of another version of staleflow."""
        if self._wrong is not None:
            raise self._wrong
        return self._answer[1]

    @property
    def age_s(self) -> float:
        """Seconds since it came."""
        came, values = self._answer
        return time.monotonic() - came if values else 0.0

    def ask_now(self) -> None:
        """One more answer, if it comes at once."""
        with contextlib.suppress(Unavailable, Refused):
            self._answer = (time.monotonic(), self._admin.status(timeout_s=1.0))

    def _ask(self) -> None:
        try:
            while not self._end.is_set():
                self.ask_now()
                self._end.wait(self._every_s)
        except ConfigError as error:
            self._wrong = error


class NewLines:
    """The lines of a ``metrics.jsonl`` that grows, each once. It need not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0

    def take(self) -> tuple[Mapping[str, Any], ...]:
        """The whole lines since the last call; all of them at first. What cannot be read now comes with a later one."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._read)
                new = file.read()
        except OSError:
            return ()
        whole = new[: new.rfind(b"\n") + 1]
        self._read += len(whole)
        return tuple(parsed(whole.split(b"\n")))
