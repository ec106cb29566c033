"""Pull versions from the parameter server and load them, one at a time, the newest order first.

Consumes orders; produces loaded weights and reports each result to the scheduler. The engine continues while bytes
arrive and stops only for the load itself, between two steps.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from staleflow.clients.rollout.engines.base import LoadError
from staleflow.clients.weights import CorruptWeights, PulledVersion, Puller
from staleflow.net.client import Client
from staleflow.net.errors import Refused
from staleflow.protocols.consistency.ids import Lineage, Version, WorkerId
from staleflow.protocols.wire.codec import ProtocolError
from staleflow.protocols.wire.messages import Done, Pulled

log = logging.getLogger(__name__)

Load = Callable[[Lineage, Version, PulledVersion], Awaitable[None]]
"""Load weights, which stay readable until it returns. Raises ``LoadError`` if they do not fit."""


class Pulls:
    """The loaded and the ordered version. ``on_loaded`` is called after each successful load."""

    def __init__(
        self, me: WorkerId, scheduler: Client, puller: Puller, load: Load, on_loaded: Callable[[], None]
    ) -> None:
        self.loaded = (Lineage(0), Version(-1))
        self._me = me
        self._scheduler = scheduler
        self._puller = puller
        self._load = load
        self._on_loaded = on_loaded
        self._ordered_version: tuple[Lineage, Version] | None = None
        self._ordered = asyncio.Event()
        self._ended = asyncio.Event()
        """Set, and replaced by a new event, when a pull ends."""

    def order(self, lineage: Lineage, version: Version) -> None:
        """Load this version next, replacing an order that has not started."""
        self._ordered_version = (lineage, version)
        self._ordered.set()

    async def wait_loaded(self, lineage: Lineage, version: Version) -> bool:
        """Wait until these weights or newer ones are loaded; return False if they are neither loaded nor ordered."""
        while self.loaded < (lineage, version):
            if self._ordered_version is None or self._ordered_version < (lineage, version):
                return False
            await self._ended.wait()
        return True

    async def wait_exactly(self, lineage: Lineage, version: Version) -> bool:
        """Wait until exactly these weights are loaded; return False if they are neither loaded nor ordered."""
        while self.loaded != (lineage, version):
            if self._ordered_version != (lineage, version):
                return False
            await self._ended.wait()
        return True

    async def run(self) -> None:
        """Execute orders until cancelled."""
        while True:
            await self._ordered.wait()
            self._ordered.clear()
            if self._ordered_version is not None and self._ordered_version != self.loaded:
                await self._pull(*self._ordered_version)

    async def _pull(self, lineage: Lineage, version: Version) -> None:
        sha, ok, way = "", False, ""
        try:
            async with await self._puller.pull(lineage, version) as pulled:
                sha, way = pulled.sha, pulled.way
                await self._load(lineage, version, pulled)
            ok = True
            self.loaded = (lineage, version)
            self._on_loaded()
            log.info("version %d of lineage %d is loaded, %s", version, lineage, way)
        except (Refused, ProtocolError, CorruptWeights, LoadError) as error:
            log.error("version %d of lineage %d not loaded: %s", version, lineage, error)
            if self._ordered_version == (lineage, version):
                self._ordered_version = None
        # Replace the event before setting it: a waiter that still needs another version then waits for the new event.
        ended, self._ended = self._ended, asyncio.Event()
        ended.set()
        try:
            message = Pulled(worker=self._me, lineage=lineage, version=version, sha=sha, ok=ok)
            await self._scheduler.ask(message, Done, timeout_s=None)
        except Refused as no:
            log.warning("report of version %d rejected: %s", version, no)
