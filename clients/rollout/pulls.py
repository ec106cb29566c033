"""Versions from the parameter server into the engine, one at a time, the newest order first.

Consumes orders; produces loaded weights, and tells the scheduler how it went. The engine goes on while bytes arrive and
stops for the load itself, between two steps.
"""

import asyncio
import logging
from collections.abc import Callable

from staleflow.clients.rollout.engines.base import AsyncEngine, LoadError
from staleflow.clients.weights import CorruptWeights, Puller
from staleflow.net.client import Client
from staleflow.net.errors import Refused
from staleflow.protocols.consistency.ids import Lineage, Version, WorkerId
from staleflow.protocols.wire.codec import ProtocolError
from staleflow.protocols.wire.messages import Done, Pulled

log = logging.getLogger(__name__)


class Pulls:
    """What is loaded and what is wanted. ``on_loaded`` is called after each load that worked."""

    def __init__(
        self, me: WorkerId, scheduler: Client, puller: Puller, engine: AsyncEngine, on_loaded: Callable[[], None]
    ) -> None:
        self.loaded = (Lineage(0), Version(-1))
        self._me = me
        self._scheduler = scheduler
        self._puller = puller
        self._engine = engine
        self._on_loaded = on_loaded
        self._wanted: tuple[Lineage, Version] | None = None
        self._ordered = asyncio.Event()
        self._ended = asyncio.Event()
        """Set, and made anew, when a pull ends."""

    def order(self, lineage: Lineage, version: Version) -> None:
        """Load these next; an order that has not begun is forgotten."""
        self._wanted = (lineage, version)
        self._ordered.set()

    async def reached(self, lineage: Lineage, version: Version) -> bool:
        """True once these weights or newer ones are loaded; False when they are not on their way."""
        while self.loaded < (lineage, version):
            if self._wanted is None or self._wanted < (lineage, version):
                return False
            await self._ended.wait()
        return True

    async def run(self) -> None:
        """Pull for ever."""
        while True:
            await self._ordered.wait()
            self._ordered.clear()
            if self._wanted is not None and self._wanted != self.loaded:
                await self._pull(*self._wanted)

    async def _pull(self, lineage: Lineage, version: Version) -> None:
        sha, ok, way = "", False, ""
        try:
            async with await self._puller.pull(lineage, version) as pulled:
                sha, way = pulled.sha, pulled.way
                await self._engine.load(pulled.arrays(), lineage, version)
            ok = True
            self.loaded = (lineage, version)
            self._on_loaded()
            log.info("version %d of lineage %d is loaded, %s", version, lineage, way)
        except (Refused, ProtocolError, CorruptWeights, LoadError) as error:
            log.error("version %d of lineage %d is not loaded: %s", version, lineage, error)
            if self._wanted == (lineage, version):
                self._wanted = None
        ended, self._ended = self._ended, asyncio.Event()
        ended.set()
        try:
            message = Pulled(worker=self._me, lineage=lineage, version=version, sha=sha, ok=ok)
            await self._scheduler.ask(message, Done, timeout_s=None)
        except Refused as no:
            log.warning("the news of version %d is refused: %s", version, no)
