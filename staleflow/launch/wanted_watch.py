"""Follow which rollout workers the scheduler wants, from a machine that has no key to read the status."""

import threading
import time

from staleflow.clients.admin import Admin
from staleflow.net.errors import Refused, Unavailable
from staleflow.net.permissions import Role
from staleflow.net.security import client_sockets

POLL_INTERVAL_S = 2.0
REPLY_TIMEOUT_S = 5.0
SILENCE_TIMEOUT_S = 20.0
"""Seconds without an answer after which the scheduler counts as ended with its run."""


class WantedWatch:
    """Thread that asks the scheduler regularly."""

    def __init__(self, connect: str) -> None:
        self.wanted: tuple[str, ...] = ()
        """Names of the wanted workers; empty before the first answer."""
        self.ended = False
        """The run ends, or its scheduler has not answered for ``SILENCE_TIMEOUT_S``."""
        self._admin = Admin(connect, "machine", transport=client_sockets(None, Role.ROLLOUT))
        self._answered_s = time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="wanted", daemon=True)

    def __enter__(self) -> "WantedWatch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(REPLY_TIMEOUT_S + 1.0)
        self._admin.close()

    def poll_now(self) -> None:
        """Ask once in the calling thread; keep the previous answer if the scheduler does not answer in time."""
        try:
            reply = self._admin.attach(REPLY_TIMEOUT_S)
            self.wanted, self.ended = reply.wanted, reply.ending
            self._answered_s = time.monotonic()
        except (Unavailable, Refused):
            self.ended = time.monotonic() - self._answered_s > SILENCE_TIMEOUT_S

    def _follow(self) -> None:
        while not self._stop.is_set():
            self.poll_now()
            self._stop.wait(POLL_INTERVAL_S)
