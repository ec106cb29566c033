"""What a shard stores of one pushed group, and how it becomes that from what a worker sends."""

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.consistency.events import Segment
from staleflow.protocols.consistency.ids import GroupId, LeaseId, WorkerId
from staleflow.protocols.wire.codec import ProtocolError
from staleflow.protocols.wire.messages import PushItem, RegisterPush
from staleflow.protocols.wire.stages import ENVIRONMENT
from staleflow.protocols.wire.tensors import arrays, pack
from staleflow.protocols.wire.trajectory import GroupPayload

MOST_ID = 1 << 61
"""Above it the ledger's rows of groups would be those of something else."""


class Key(NamedTuple):
    """A payload is named by its group and the lease that produced it."""

    group: GroupId
    lease: LeaseId


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """All that is known of a payload without reading it."""

    worker: WorkerId
    sha: str
    """Hex sha256 of the packed payload."""
    nbytes: int
    truncated: bool
    segments: list[Segment]
    samples: list[int]
    """Sampled tokens of each sample."""
    tokens: int
    """Of all completions, an environment's among them: so long is a column of one value a token."""


class Pushed(NamedTuple):
    """One payload that came in."""

    key: Key
    record: Record
    blob: bytes


def pushed(item: PushItem, frames: Sequence[memoryview], samples: int) -> Pushed:
    """The payload of a push, checked. ``ProtocolError`` names the first thing that is wrong."""
    if not (0 <= item.group < MOST_ID and 0 <= item.lease < MOST_ID):
        raise ProtocolError(Code.MALFORMED, f"there is no lease {item.lease} of a group {item.group}")
    named = arrays(item.frames, frames)
    payload = GroupPayload.from_arrays(named)
    if made := [name for name in payload.stages if not name.startswith(ENVIRONMENT)]:
        raise ProtocolError(Code.MALFORMED, f"a push has no stage columns; it has {', '.join(made)}")
    if payload.num_samples != samples:
        raise ProtocolError(Code.MALFORMED, f"a group has {samples} samples; {payload.num_samples} came")
    blob = pack(named)
    record = Record(
        worker=item.worker,
        sha=hashlib.sha256(blob).hexdigest(),
        nbytes=len(blob),
        truncated=item.truncated,
        segments=payload.segment_summary(),
        samples=payload.sampled_lengths().tolist(),
        tokens=payload.num_tokens,
    )
    return Pushed(Key(item.group, item.lease), record, blob)


def register_push(key: Key, record: Record, shard: int) -> RegisterPush:
    """What the scheduler is told of a payload that is durable."""
    return RegisterPush(
        group=key.group,
        lease=key.lease,
        worker=record.worker,
        shard=shard,
        sha=record.sha,
        nbytes=record.nbytes,
        truncated=record.truncated,
        segments=record.segments,
        samples=record.samples,
    )
