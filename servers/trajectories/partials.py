"""Samples of groups that change their instance, in memory until the next one has them.

Nothing here is ever trained: what another instance makes of it comes back as a push of its own lease. So nothing is
durable, and when there is no room the oldest go; their groups are begun anew.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from staleflow.net.errors import Refused
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.consistency.ids import GroupId, LeaseId
from staleflow.protocols.wire.messages import PartialFrames
from staleflow.protocols.wire.partial_samples import check_partial
from staleflow.protocols.wire.payload_limits import PLAIN, PayloadLimits
from staleflow.servers.trajectories.records import Key

MAX_BYTES = 256 << 20
"""Of all samples kept: those of some hundred groups of eight long ones."""

OVERHEAD_BYTES = 4 << 10
"""Of one group's samples, however short they are: what describes them, and what finds them."""


@dataclass(frozen=True, slots=True)
class Partial:
    """The samples of one group, as its lease left them."""

    key: Key
    header: PartialFrames
    frames: list[bytes]

    @property
    def nbytes(self) -> int:
        named = sum(len(spec.name) for spec in self.header.frames)
        return OVERHEAD_BYTES + named + sum(map(len, self.frames))


class Partials:
    """At most one a group, that of its newest lease."""

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
    ) -> None:
        """Keep samples. ``ProtocolError`` when they are none, or exceed the run's ``limits``; ``Refused`` when they
        never fit, or the lease left others. ``samples``: of a group that moves; 0: any number."""
        check_partial(header, frames, lease=key.lease, limits=limits, samples=samples)
        partial = Partial(key, header, [bytes(frame) for frame in frames])
        if partial.nbytes > self._most_bytes:
            raise Refused(Code.OVERSIZE, f"{partial.nbytes} bytes of samples; at most {self._most_bytes} are kept")
        known = self._kept.get(key.group)
        if known is not None and known.key.lease > key.lease:
            raise Refused(Code.STALE_LEASE, f"lease {known.key.lease} of group {key.group} has left, too")
        if known is not None and known.key == key and known != partial:
            raise Refused(Code.CONFLICT, f"lease {key.lease} of group {key.group} has left other samples")
        self._drop(key.group)
        self._kept[key.group] = partial
        self._nbytes += partial.nbytes
        while self._nbytes > self._most_bytes:
            self._drop(next(iter(self._kept)))

    def find(self, key: Key) -> Partial | None:
        """What that lease left; None when it is lost."""
        partial = self._kept.get(key.group)
        return partial if partial is not None and partial.key == key else None

    def forget(self, group: GroupId, lease: LeaseId) -> None:
        """A later lease has been pushed: what an earlier one left is of no use."""
        partial = self._kept.get(group)
        if partial is not None and partial.key.lease < lease:
            self._drop(group)

    def _drop(self, group: GroupId) -> None:
        partial = self._kept.pop(group, None)
        if partial is not None:
            self._nbytes -= partial.nbytes
