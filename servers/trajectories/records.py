"""Record that a shard stores for each pushed group, and its construction from a worker's push."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.consistency.ids import GroupId, LeaseId, Segment, WorkerId
from staleflow.protocols.wire.codec import Data, ProtocolError
from staleflow.protocols.wire.messages import Place, PushItem, RegisterPush
from staleflow.protocols.wire.payload_digest import payload_digest
from staleflow.protocols.wire.payload_limits import PLAIN, PayloadLimits
from staleflow.protocols.wire.stages import ENVIRONMENT_REWARD
from staleflow.protocols.wire.tensors import Array, arrays, pack, unpack
from staleflow.protocols.wire.trajectory import GroupPayload

MAX_ID = 1 << 61
"""Maximum group and lease number. Larger ones would collide with other key ranges of the ledger's tables."""
MAX_VERSIONS = 2_048
"""Maximum number of versions in one group: twice what any staleness bound allows."""


class Key(NamedTuple):
    """Identity of a payload: its group and the lease that produced it."""

    group: GroupId
    lease: LeaseId


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """Metadata of a payload, available without reading it."""

    worker: WorkerId
    sha: str
    """Digest of the packed payload, see ``payload_digest``."""
    nbytes: int
    truncated: bool
    segments: list[Segment]
    samples: list[int]
    """Sampled tokens of each sample."""
    tokens: int
    """Tokens of all completions, those of an environment included: the length of a per-token column."""
    prompt_tokens: int
    """Tokens of the prompt, which all samples share."""
    rewards: bytes = b""
    """Rewards of its environment as float32 bytes, one per sample, which need no stage worker; empty: none."""
    slab: str = ""
    """Slab that the payload lies in; empty: it lies in the store."""
    offset: int = 0
    """Offset of its first byte in the slab."""

    @property
    def reward(self) -> Array | None:
        """Column of the reward stage, float32 [n], or None if no environment computed it."""
        return np.frombuffer(self.rewards, np.float32) if self.rewards else None


class Pushed(NamedTuple):
    """One parsed and checked push."""

    key: Key
    record: Record
    blob: bytes
    """The packed payload; empty if it lies in a slab already."""


ReadSlab = Callable[[WorkerId, Place], memoryview]
"""Function that returns the bytes at a place in one of a worker's slabs."""


def parse_push(
    item: PushItem,
    frames: Sequence[memoryview],
    samples: int,
    read_slab: ReadSlab | None = None,
    limits: PayloadLimits = PLAIN,
) -> Pushed:
    """Check a push and return it as a ``Pushed``. Raise ``ProtocolError`` for the first violation.

    ``read_slab``: reader for payload that lies in a slab; without it, a push that names a place is rejected.
    ``limits``: payload limits of the run.
    """
    place = item.place
    if not (0 <= item.group < MAX_ID and 0 <= item.lease < MAX_ID):
        raise ProtocolError(
            Code.MALFORMED, f"group {item.group} or lease {item.lease} is out of range; 0 to {MAX_ID - 1} are allowed"
        )
    data = None if place is None else _in_slab(item, place, read_slab)
    named = arrays(item.frames, frames) if data is None else unpack(data)
    payload = GroupPayload.from_arrays(named)
    if payload.num_samples != samples:
        raise ProtocolError(Code.MALFORMED, f"{payload.num_samples} samples received; a group has {samples}")
    limits.check(payload)
    if len(segments := payload.segment_summary()) > MAX_VERSIONS:
        raise ProtocolError(Code.MALFORMED, f"{len(segments)} segments by version; at most {MAX_VERSIONS} are allowed")
    # One piece in place of many arrays: BLAKE3 gains more than the copy costs.
    blob = pack(named) if data is None else b""
    packed: Data = blob if data is None else data
    rewards = payload.stages.get(ENVIRONMENT_REWARD)
    record = Record(
        worker=item.worker,
        sha=payload_digest((packed,)),
        nbytes=len(packed),
        truncated=item.truncated,
        segments=segments,
        samples=payload.sampled_lengths(),
        tokens=payload.num_tokens,
        prompt_tokens=len(payload.prompt_ids),
        rewards=b"" if rewards is None else rewards.tobytes(),
        slab="" if place is None else place.slab,
        offset=0 if place is None else place.offset,
    )
    return Pushed(Key(item.group, item.lease), record, blob)


def _in_slab(item: PushItem, place: Place, read_slab: ReadSlab | None) -> memoryview:
    if read_slab is None or item.frames:
        raise ProtocolError(
            Code.MALFORMED,
            f"group {item.group} names a place in a slab that cannot be read here, or has frames as well",
        )
    return read_slab(item.worker, place)


def register_push(key: Key, record: Record, shard: int, *, occupies: bool, reward: float | None) -> RegisterPush:
    """Build the registration of a durable payload. ``occupies``: it has passed all stages already, with this mean
    ``reward``."""
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
        sequence_tokens=record.tokens + len(record.samples) * record.prompt_tokens,
        occupies=occupies,
        reward=reward,
    )
