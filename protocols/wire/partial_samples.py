"""Partial samples that move with a group to another instance. The shard and the receiving worker both check them."""

from collections.abc import Iterable, Sequence

import msgspec

from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.consistency.ids import LeaseId
from staleflow.protocols.wire.codec import Data, ProtocolError
from staleflow.protocols.wire.messages import PartialFrames
from staleflow.protocols.wire.payload_digest import payload_digest
from staleflow.protocols.wire.payload_limits import PayloadLimits
from staleflow.protocols.wire.tensors import arrays
from staleflow.protocols.wire.trajectory import GroupPayload


def partial_sha(header: PartialFrames, frames: Iterable[Data]) -> str:
    """Return the digest of the samples and their header.

    The instance that wrote the samples sends it to the scheduler, which passes it to the next instance. Without it
    another worker could replace the samples once the shard has dropped them for lack of room.
    """
    return payload_digest((msgspec.msgpack.encode(header), *frames))


def check_partial(
    header: PartialFrames, frames: Sequence[memoryview], *, lease: LeaseId, limits: PayloadLimits, samples: int = 0
) -> GroupPayload:
    """Return the checked samples that ``lease`` left.

    ``samples`` is the number of samples of a group; 0 accepts any. ``ProtocolError`` names the first problem.
    """
    if not 0 < header.origin <= lease:
        detail = f"lease {lease} names {header.origin} as the one it began under; that must be from 1 to {lease}"
        raise ProtocolError(Code.MALFORMED, detail)
    payload = GroupPayload.from_arrays(arrays(header.frames, frames))
    if samples and payload.num_samples != samples:
        raise ProtocolError(Code.MALFORMED, f"a group has {samples} samples; {payload.num_samples} came")
    limits.check(payload)
    return payload
