"""Samples that a group takes to another instance: checked where they are kept, and again where they arrive. Pure."""

import hashlib
from collections.abc import Iterable, Sequence

import msgspec

from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.consistency.ids import LeaseId
from staleflow.protocols.wire.codec import Data, ProtocolError
from staleflow.protocols.wire.messages import PartialFrames
from staleflow.protocols.wire.payload_limits import PayloadLimits
from staleflow.protocols.wire.tensors import arrays
from staleflow.protocols.wire.trajectory import GroupPayload


def partial_sha(header: PartialFrames, frames: Iterable[Data]) -> str:
    """Hex sha256 of samples and everything that describes them.

    The instance that wrote them sends it to the scheduler, which passes it to the next one. Without it another worker
    could replace them, once the shard has dropped them for want of room.
    """
    digest = hashlib.sha256(msgspec.msgpack.encode(header))
    for frame in frames:
        digest.update(frame)
    return digest.hexdigest()


def check_partial(
    header: PartialFrames, frames: Sequence[memoryview], *, lease: LeaseId, limits: PayloadLimits, samples: int = 0
) -> GroupPayload:
    """Return the samples that ``lease`` left. ``ProtocolError`` names the first thing that is wrong.

    ``samples``: how many the group has; 0: any number.
    """
    if not 0 < header.origin <= lease:
        detail = f"lease {lease} names {header.origin} as the one it began under; that must be from 1 to {lease}"
        raise ProtocolError(Code.MALFORMED, detail)
    payload = GroupPayload.from_arrays(arrays(header.frames, frames))
    if samples and payload.num_samples != samples:
        raise ProtocolError(Code.MALFORMED, f"a group has {samples} samples; {payload.num_samples} came")
    limits.check(payload)
    return payload
