"""Deltas between versions of the folder: made when somebody asks for them, and kept while there is room.

A delta is of one span and goes to readers who hold another version already, most often the one before. Several of them
ask for the same in the same seconds, so what was made stays in memory, the last used ones up to ``KEPT_BYTES``.
"""

import asyncio
from collections import OrderedDict

from staleflow.configs.schema import DeltaKind
from staleflow.net.errors import Refused
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.wire.delta import WIDTHS, encode
from staleflow.protocols.wire.messages import GetDelta, Manifest
from staleflow.servers.parameters.versions import Stored, Versions

KEPT_BYTES = 256 << 20
ENCODING = 2
"""Spans encoded at once, each by one thread: the trainer's host has other work."""
SPAN_BYTES = 16 << 20
"""The largest span that is diffed for a reader."""


class Deltas:
    """Belongs to one loop; encoding happens in threads."""

    def __init__(self, versions: Versions, kind: DeltaKind) -> None:
        self._versions = versions
        self._kind = kind
        self._kept: OrderedDict[GetDelta, bytes] = OrderedDict()
        self._kept_bytes = 0
        self._making: dict[GetDelta, asyncio.Lock] = {}
        self._encoding = asyncio.Semaphore(ENCODING)

    def check(self, ask: GetDelta, old: Manifest, new: Manifest) -> None:
        """``Refused`` when no delta of that span can be made."""
        if self._kind == "off":
            raise Refused(Code.DENIED, 'parameters.delta is "off" in this run')
        size = new.nbytes
        if old.nbytes != size:
            detail = f"versions {ask.base_version} and {ask.version} are not of one size"
            raise Refused(Code.BAD_VERSION, detail)
        inside = 0 <= ask.offset < ask.offset + ask.nbytes <= size and ask.nbytes <= SPAN_BYTES
        if ask.width not in WIDTHS or not inside or ask.nbytes % ask.width:
            detail = f"{ask.nbytes} bytes of width {ask.width} at {ask.offset} are no span of a version of {size} bytes"
            raise Refused(Code.MALFORMED, detail)

    async def make(self, ask: GetDelta, old: Stored, new: Stored | memoryview) -> bytes:
        """The delta of a span that ``check`` let pass, to a version or to the bytes that the span has in it; made once,
        however many ask. ``FileNotFoundError`` when a version is gone."""
        making = self._making.setdefault(ask, asyncio.Lock())
        try:
            async with making:
                if (known := self._kept.get(ask)) is not None:
                    self._kept.move_to_end(ask)
                    return known
                async with self._encoding:
                    made = await asyncio.to_thread(self._encode, ask, old, new)
                self.keep(ask, made)
                return made
        finally:
            if self._making.get(ask) is making:
                del self._making[ask]

    def _encode(self, ask: GetDelta, old: Stored, new: Stored | memoryview) -> bytes:
        was = self._versions.read(old, ask.offset, ask.nbytes)
        now = new if isinstance(new, memoryview) else self._versions.read(new, ask.offset, ask.nbytes)
        if len(was) != ask.nbytes or len(now) != ask.nbytes:
            raise FileNotFoundError(f"version {ask.base_version} or {ask.version} ends early")
        return encode(was, now, ask.width, compress=self._kind == "compressed")

    def keep(self, ask: GetDelta, made: bytes) -> None:
        """A delta that is known to be right, for whoever asks for the same."""
        self._kept_bytes -= len(self._kept.pop(ask, b""))
        self._kept[ask] = made
        self._kept_bytes += len(made)
        while self._kept_bytes > KEPT_BYTES:
            _, oldest = self._kept.popitem(last=False)
            self._kept_bytes -= len(oldest)
