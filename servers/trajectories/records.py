"""What a shard stores of one pushed group, and how it becomes that from what a worker sends."""

import hashlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.consistency.ids import GroupId, LeaseId, Segment, WorkerId
from staleflow.protocols.wire.codec import Data, ProtocolError
from staleflow.protocols.wire.messages import Place, PushItem, RegisterPush
from staleflow.protocols.wire.payload_limits import PLAIN, PayloadLimits
from staleflow.protocols.wire.stages import ENVIRONMENT_REWARD
from staleflow.protocols.wire.tensors import Array, arrays, pieces, unpack
from staleflow.protocols.wire.trajectory import GroupPayload

MAX_ID = 1 << 61
"""Above it the ledger's rows of groups would be those of something else."""
MAX_VERSIONS = 2_048
"""That may have written a group: twice what any bound allows."""


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
    prompt_tokens: int
    """Of the prompt, which every sample begins with."""
    rewards: bytes = b""
    """What its environment returned, float32, one a sample: no worker makes them. Empty: it returned none."""
    slab: str = ""
    """The slab that the payload lies in; empty: the store has it."""
    offset: int = 0
    """Of its first byte there."""

    @property
    def reward(self) -> Array | None:
        """The column of the reward stage, float32 [n], if the environment made it."""
        return np.frombuffer(self.rewards, np.float32) if self.rewards else None


class Pushed(NamedTuple):
    """One payload that came in."""

    key: Key
    record: Record
    parts: Sequence[Data]
    """The packed payload, one part behind the other; none when it lies in a slab already."""

    @property
    def blob(self) -> bytes:
        """The packed payload, copied."""
        return b"".join(self.parts)


Written = Callable[[WorkerId, Place], memoryview]
"""What a worker has written into one of its slabs."""


def pushed(
    item: PushItem,
    frames: Sequence[memoryview],
    samples: int,
    written: Written | None = None,
    limits: PayloadLimits = PLAIN,
) -> Pushed:
    """The payload of a push, checked. ``ProtocolError`` names the first thing that is wrong.

    ``written``: where payload lies that does not come in frames; without it none may. ``limits``: those of the run.
    """
    place = item.place
    if not (0 <= item.group < MAX_ID and 0 <= item.lease < MAX_ID):
        raise ProtocolError(Code.MALFORMED, f"there is no lease {item.lease} of a group {item.group}")
    data = None if place is None else _in_slab(item, place, written)
    named = arrays(item.frames, frames) if data is None else unpack(data)
    payload = GroupPayload.from_arrays(named)
    if payload.num_samples != samples:
        raise ProtocolError(Code.MALFORMED, f"a group has {samples} samples; {payload.num_samples} came")
    limits.check(payload)
    if len(segments := payload.segment_summary()) > MAX_VERSIONS:
        raise ProtocolError(Code.MALFORMED, f"{len(segments)} versions wrote it; at most {MAX_VERSIONS} can")
    parts: list[Data] = [*pieces(named)] if data is None else [data]
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    rewards = payload.stages.get(ENVIRONMENT_REWARD)
    record = Record(
        worker=item.worker,
        sha=digest.hexdigest(),
        nbytes=sum(map(len, parts)),
        truncated=item.truncated,
        segments=segments,
        samples=payload.sampled_lengths(),
        tokens=payload.num_tokens,
        prompt_tokens=len(payload.prompt_ids),
        rewards=b"" if rewards is None else rewards.tobytes(),
        slab="" if place is None else place.slab,
        offset=0 if place is None else place.offset,
    )
    return Pushed(Key(item.group, item.lease), record, parts if place is None else ())


def _in_slab(item: PushItem, place: Place, written: Written | None) -> memoryview:
    if written is None or item.frames:
        raise ProtocolError(Code.MALFORMED, f"group {item.group} comes in frames, or names a place; here it is both")
    return written(item.worker, place)


def register_push(key: Key, record: Record, shard: int, *, occupies: bool) -> RegisterPush:
    """What the scheduler is told of a payload that is durable. ``occupies``: and through all stages."""
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
    )
