"""Messages to a trajectory server (prompt rows, payload, stages), and its prompt features for the scheduler."""

from typing import Any

import msgspec

from staleflow.protocols.consistency.ids import GroupId, LeaseId, WorkerId
from staleflow.protocols.wire.messages.base import Count, Message, Part, Sha, TensorSpec


class GetRows(Message, frozen=True, kw_only=True):
    """Request prompt rows by group id, and the partial samples of some of the groups. -> Rows"""

    groups: list[GroupId]
    partials: list[LeaseId] = msgspec.field(default_factory=list[LeaseId])
    """Empty, or for each group the lease under which its partial samples were put; 0: none are wanted."""
    most_bytes: Count = 64 << 20
    """Maximum size of the reply; its first group may exceed it."""


class PartialFrames(Part, frozen=True, kw_only=True):
    """Partial samples of a group: the next frames, described by ``frames``."""

    origin: LeaseId
    """First lease under which any of the samples was written; its seeds also draw the remaining tokens."""
    frames: list[TensorSpec]


class Rows(Message, frozen=True, kw_only=True):
    """Columns and partial samples of as many of the first requested groups as fit, in the requested order.

    The partial samples are None if they are not wanted, lost, or larger than a reply may be.
    """

    rows: list[dict[str, Any]]
    partials: list[PartialFrames | None] = msgspec.field(default_factory=list[PartialFrames | None])
    """Empty, or one for each row."""


class PutPartial(Message, frozen=True, kw_only=True):
    """Store the partial samples of a group in memory, for the instance that will continue them.

    They include every sample that was started (``trajectory.GroupPayload``); unfinished ones are marked interrupted.
    -> Done, or Refusal if there is no room
    """

    group: GroupId
    lease: LeaseId
    partial: PartialFrames


class GetSlab(Message, frozen=True, kw_only=True):
    """A worker on the shard's host requests a file to write payload into; both sides map it. -> Slab, or Refusal"""

    worker: WorkerId
    host: str
    """Kernel boot id of the worker, or "" if it cannot open the slabs it was given. A worker whose id differs from the
    server's gets no slab and returns those that it has."""
    number: Count
    """Sequence number of this worker's requests, from 1. A late copy of an older request changes nothing."""
    held: list[str]
    """Slabs that the worker still writes into, or whose pushes wait for a reply; the others may be reused."""


class Slab(Message, frozen=True, kw_only=True):
    """An empty slab for this worker alone."""

    folder: str
    """Folder of the slabs; "" if this worker will never get one."""
    name: str
    """Name of the slab; "" if there is no room now, or the worker has enough slabs from which it has pushed nothing."""
    nbytes: Count
    known: list[str]
    """All slabs of this worker that still exist, including this one."""


class Place(Part, frozen=True, kw_only=True):
    """A packed payload (``tensors.pack``) inside a slab."""

    slab: str
    offset: Count
    nbytes: Count


class PushItem(Part, frozen=True, kw_only=True):
    """One group of a push: the next frames, described by ``frames``, or a place and no frames."""

    group: GroupId
    lease: LeaseId
    worker: WorkerId
    truncated: bool
    frames: list[TensorSpec]
    place: Place | None = None
    """Location of the payload in one of this worker's own slabs."""


class PushGroups(Message, frozen=True, kw_only=True):
    """Push finished groups with their arrays (``trajectory.GroupPayload``). -> Results, one for each group

    The reply is sent once the groups are durable *and* registered. A group for which there is no room is ``busy``. A
    push without groups tests for room: it is refused with ``busy`` until there is room.
    """

    items: list[PushItem]


class GetStageWork(Message, frozen=True, kw_only=True):
    """A stage worker waits for at most ``max_groups`` groups. -> StageWork (empty after ``wait_ms``)"""

    stage: str
    worker: WorkerId
    max_groups: int
    wait_ms: int = 1000
    host: str = ""
    """As in ``GetGroups``."""
    held: list[int] = msgspec.field(default_factory=list[int])
    """Tickets of the groups that the worker has. Other groups dealt to it here never arrived and are dealt again."""
    checks: bool = False
    """The worker checks the digest of every payload itself; otherwise the shard does so before the reply."""
    most_bytes: Count = 64 << 20
    """Maximum size of the reply's frames; its first group may exceed it."""
    calls: Count = 0
    """Maximum number of concurrent calls of user code in the worker; 0 if a model makes the columns."""


class StageItem(Part, frozen=True, kw_only=True):
    """One group for a stage; ``ticket`` fences a worker that lost the group."""

    group: GroupId
    lease: LeaseId
    ticket: int
    row: dict[str, Any]
    frames: list[TensorSpec]
    """Columns of other stages that this stage needs. The packed payload is the frame after these, or has a place."""
    sha: Sha
    """Digest of the packed payload."""
    place: Place | None = None


class StageWork(Message, frozen=True, kw_only=True):
    items: list[StageItem]
    folder: str = ""
    """Folder of the slabs."""
    waited_ms: Count = 0
    """Time for which the shard had no group; the rest of the round trip was transfer."""


class StageResult(Part, frozen=True, kw_only=True):
    """Result of a stage for one group: float32 columns in frames, or the reason for the failure."""

    group: GroupId
    lease: LeaseId
    ticket: int
    frames: list[TensorSpec]
    error: str = ""


class PutStageResults(Message, frozen=True, kw_only=True):
    """Return the results of a stage. -> Results, one for each group"""

    stage: str
    worker: WorkerId
    results: list[StageResult]


class GetGroups(Message, frozen=True, kw_only=True):
    """Request the payload of sealed groups. -> Groups

    Refused if a payload is corrupt: that group is quarantined and the batch changes.
    """

    groups: list[GroupId]
    shas: list[str]
    host: str = ""
    """Kernel boot id of the reader, which maps payload in slabs if it equals the server's; "": send all in frames."""
    checks: bool = False
    """The reader checks the digest of every payload itself: each is sent packed, as it is stored, and the stage columns
    of all groups in one frame a column."""


class GroupFrames(Part, frozen=True, kw_only=True):
    """One group: all its arrays, or the packed payload for a reader that checks it."""

    group: GroupId
    row: dict[str, Any]
    frames: list[TensorSpec]
    place: Place | None = None
    """Location of the packed payload in a slab."""
    packed: bool = False
    """The only frame is the packed payload, with an unchecked digest."""


class MadeColumn(Part, frozen=True, kw_only=True):
    """A stage column of all groups of a reply: their values, one group after another, in one float32 frame."""

    name: str
    counts: list[Count]
    """Number of values of each group, in order; 0 if the group has no such column."""


class Groups(Message, frozen=True, kw_only=True):
    """Payloads in the requested order: the frames of the columns, then those of each group, one after another."""

    groups: list[GroupFrames]
    folder: str = ""
    """Folder of the slabs."""
    columns: list[MadeColumn] = msgspec.field(default_factory=list[MadeColumn])
    """Stage columns of groups that are packed or have a place; the other groups have theirs among their arrays."""


FEATURES = 32
"""Number of features of one prompt."""


class PromptFeatures(Message, frozen=True, kw_only=True):
    """A shard sends the requested features and waits for the next request. -> PromptFeaturesReply, within ``wait_ms``

    ``frames`` names one frame, ``features``, float16 [len(rows), FEATURES]; no frame if ``rows`` is empty.
    """

    shard: int
    rows: list[int]
    frames: list[TensorSpec]
    wait_ms: int = 10_000


class PromptFeaturesReply(Message, frozen=True, kw_only=True):
    """Prompt rows whose features the shard must send next; may be empty."""

    rows: list[int]
