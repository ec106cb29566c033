"""Partial samples of groups that migrate, kept in memory until the next instance fetches them.

They are never trained directly: the next instance continues them and pushes the result under its own lease. So they
need not be durable, and when there is no room the oldest are discarded; their groups start over from the prompt.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from staleflow.net.errors import Refused
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.consistency.ids import GroupId, LeaseId
from staleflow.protocols.wire.messages import PartialFrames
from staleflow.protocols.wire.partial_samples import check_partial
from staleflow.protocols.wire.payload_limits import PLAIN, PayloadLimits
from staleflow.servers.trajectories.records import Key

MAX_BYTES = 256 << 20
"""Maximum size of all partial samples: some hundred groups of eight long ones."""

OVERHEAD_BYTES = 4 << 10
"""Bookkeeping bytes charged per group, however short its samples are: their header and the index entry."""


@dataclass(frozen=True, slots=True)
class Partial:
    """Samples of one group, as its lease left them."""

    key: Key
    header: PartialFrames
    frames: list[bytes]
    peer: str = field(default="", compare=False)
    """Connected worker that sent them."""

    @property
    def nbytes(self) -> int:
        named = sum(len(spec.name) for spec in self.header.frames)
        return OVERHEAD_BYTES + named + sum(map(len, self.frames))


class Partials:
    """Partial samples by group: at most one entry each, that of the newest lease."""

    def __init__(self, most_bytes: int = MAX_BYTES) -> None:
        self._most_bytes = most_bytes
        self._kept: dict[GroupId, Partial] = {}
        self._nbytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def put(
        self,
        key: Key,
        header: PartialFrames,
        frames: Sequence[memoryview],
        limits: PayloadLimits = PLAIN,
        samples: int = 0,
        peer: str = "",
    ) -> None:
        """Store the samples that a lease left.

        ``samples``: number of samples of a group that migrates; 0: any. ``peer``: worker that sent them, which may
        replace them: it generates on after a handover that the scheduler has refused. Raise ``ProtocolError`` if they
        are malformed or exceed the run's ``limits``, and ``Refused`` if they can never fit, a newer lease has left
        samples, or another worker has sent different ones for this lease.
        """
        check_partial(header, frames, lease=key.lease, limits=limits, samples=samples)
        partial = Partial(key, header, [bytes(frame) for frame in frames], peer)
        if partial.nbytes > self._most_bytes:
            raise Refused(
                Code.OVERSIZE, f"the samples have {partial.nbytes} bytes; at most {self._most_bytes} are kept"
            )
        existing = self._kept.get(key.group)
        if existing is not None and existing.key.lease > key.lease:
            raise Refused(
                Code.STALE_LEASE, f"lease {existing.key.lease} of group {key.group} is newer and has left samples"
            )
        own = existing is not None and bool(peer) and existing.peer == peer
        if existing is not None and existing.key == key and existing != partial and not own:
            raise Refused(Code.CONFLICT, f"lease {key.lease} of group {key.group} has already left other samples")
        self._drop(key.group)
        self._kept[key.group] = partial
        self._nbytes += partial.nbytes
        while self._nbytes > self._most_bytes:
            self._drop(next(iter(self._kept)))

    def find(self, key: Key) -> Partial | None:
        """Return the samples that this lease left, or None if they were discarded."""
        partial = self._kept.get(key.group)
        return partial if partial is not None and partial.key == key else None

    def forget(self, group: GroupId, lease: LeaseId) -> None:
        """Discard samples of leases older than ``lease``, which has been pushed."""
        partial = self._kept.get(group)
        if partial is not None and partial.key.lease < lease:
            self._drop(group)

    def _drop(self, group: GroupId) -> None:
        partial = self._kept.pop(group, None)
        if partial is not None:
            self._nbytes -= partial.nbytes
