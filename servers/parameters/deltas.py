"""Deltas between versions of the folder, encoded on request and cached.

A delta covers one span and serves readers that have another version already, usually the previous one. Several of them
request the same delta within seconds, so the most recently used ones stay in memory, up to ``KEPT_BYTES``.
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
MAX_CONCURRENT_ENCODES = 2
"""Maximum number of spans encoded at once, one thread each. Low, because the trainer runs on the same host."""
SPAN_BYTES = 16 << 20
"""Maximum size of the span of a request."""


class Deltas:
    """Delta cache. Owned by one event loop; encoding runs in threads."""

    def __init__(self, versions: Versions, kind: DeltaKind) -> None:
        self._versions = versions
        self._kind = kind
        self._kept: OrderedDict[GetDelta, bytes] = OrderedDict()
        self._kept_bytes = 0
        self._making: dict[GetDelta, asyncio.Lock] = {}
        self._encoding = asyncio.Semaphore(MAX_CONCURRENT_ENCODES)

    def check(self, ask: GetDelta, old: Manifest, new: Manifest) -> None:
        """Raise ``Refused`` if no delta of that span can be made."""
        if self._kind == "off":
            raise Refused(Code.DENIED, 'parameters.delta is "off" in this run')
        size = new.nbytes
        if old.nbytes != size:
            detail = f"versions {ask.base_version} and {ask.version} differ in size"
            raise Refused(Code.BAD_VERSION, detail)
        inside = 0 <= ask.offset < ask.offset + ask.nbytes <= size and ask.nbytes <= SPAN_BYTES
        if ask.width not in WIDTHS or not inside or ask.nbytes % ask.width:
            detail = (
                f"{ask.nbytes} bytes of width {ask.width} at {ask.offset} are not a span of a version of {size} bytes"
            )
            raise Refused(Code.MALFORMED, detail)

    async def make(self, ask: GetDelta, old: Stored, new: Stored | memoryview) -> bytes:
        """Return the delta of a span that ``check`` accepted, to a stored version or to the new bytes of the span.

        Concurrent requests for the same delta share one encoding. Raise ``FileNotFoundError`` if a version is gone.
        """
        making = self._making.setdefault(ask, asyncio.Lock())
        try:
            async with making:
                if (cached := self._kept.get(ask)) is not None:
                    self._kept.move_to_end(ask)
                    return cached
                async with self._encoding:
                    encoded = await asyncio.to_thread(self._encode, ask, old, new)
                self.keep(ask, encoded)
                return encoded
        finally:
            if self._making.get(ask) is making:
                del self._making[ask]

    def _encode(self, ask: GetDelta, old: Stored, new: Stored | memoryview) -> bytes:
        was = self._versions.read(old, ask.offset, ask.nbytes)
        now = new if isinstance(new, memoryview) else self._versions.read(new, ask.offset, ask.nbytes)
        if len(was) != ask.nbytes or len(now) != ask.nbytes:
            raise FileNotFoundError(f"version {ask.base_version} or {ask.version} ends early")
        return encode(was, now, ask.width, compress=self._kind == "compressed")

    def keep(self, ask: GetDelta, encoded: bytes) -> None:
        """Cache a verified delta for other readers."""
        self._kept_bytes -= len(self._kept.pop(ask, b""))
        self._kept[ask] = encoded
        self._kept_bytes += len(encoded)
        while self._kept_bytes > KEPT_BYTES:
            _, oldest = self._kept.popitem(last=False)
            self._kept_bytes -= len(oldest)
