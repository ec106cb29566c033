"""To a trajectory server: prompt rows, payload, stages."""

from typing import Any

import msgspec

from staleflow.protocols.consistency.ids import GroupId, LeaseId, WorkerId
from staleflow.protocols.wire.messages.base import Count, Message, Part, Sha, TensorSpec


class GetRows(Message, frozen=True, kw_only=True):
    """Prompt rows by group id, and what was written of some of the groups. -> Rows"""

    groups: list[GroupId]
    partials: list[LeaseId] = msgspec.field(default_factory=list[LeaseId])
    """Empty, or for each group the lease under which its samples so far were put; 0: none are wanted."""
    most_bytes: Count = 64 << 20
    """Of the answer, but for its first group."""


class PartialFrames(Part, frozen=True, kw_only=True):
    """Samples of a group so far: the next frames, described by ``frames``."""

    origin: LeaseId
    """The first lease that any of it was written under: what is still to be drawn is drawn by its seeds."""
    frames: list[TensorSpec]


class Rows(Message, frozen=True, kw_only=True):
    """Of as many of the first groups as fit, in the order asked: the columns of each row, and the samples so far; None
    when they are not wanted, lost, or larger than an answer may be."""

    rows: list[dict[str, Any]]
    partials: list[PartialFrames | None] = msgspec.field(default_factory=list[PartialFrames | None])
    """Empty, or one a row."""


class PutPartial(Message, frozen=True, kw_only=True):
    """The samples of a group so far, all that were started (``trajectory.GroupPayload``; what is not done is marked
    interrupted). Kept in memory for whoever goes on with them. -> Done, or Refusal when there is no room"""

    group: GroupId
    lease: LeaseId
    partial: PartialFrames


class GetSlab(Message, frozen=True, kw_only=True):
    """A worker on the shard's host asks for a file to write payload into, which both map. -> Slab, or Refusal"""

    worker: WorkerId
    host: str
    """Kernel boot id of the worker. Who has another than the server, or says none because it cannot open what it was
    given, gets no slab and gives back those that it has."""
    number: Count
    """1, 2, ... of this worker. An echo of an older question changes nothing."""
    held: list[str]
    """Its slabs that it still writes into, or whose pushes wait for their answers; the others may be given anew."""


class Slab(Message, frozen=True, kw_only=True):
    """An empty slab for this worker alone."""

    folder: str
    """Empty: there are no slabs for this worker, ever."""
    name: str
    """Empty: there is no room for one now, or the worker has enough that it has pushed nothing of."""
    nbytes: Count
    known: list[str]
    """All slabs of this worker that still exist, this one among them."""


class Place(Part, frozen=True, kw_only=True):
    """A packed payload (``tensors.pack``) inside a slab."""

    slab: str
    offset: Count
    nbytes: Count


class PushItem(Part, frozen=True, kw_only=True):
    """One group of a push: the next frames, described by ``frames``, or none of them and a place."""

    group: GroupId
    lease: LeaseId
    worker: WorkerId
    truncated: bool
    frames: list[TensorSpec]
    place: Place | None = None
    """Where this worker has written it, in one of its own slabs."""


class PushGroups(Message, frozen=True, kw_only=True):
    """Finished groups, with their arrays (``trajectory.GroupPayload``). Answered when durable *and* registered; a group
    that finds no room is ``busy``. Without any it asks whether there is room, and is refused ``busy`` until there is.

    -> Results, one a group
    """

    items: list[PushItem]


class GetStageWork(Message, frozen=True, kw_only=True):
    """A stage worker waits for groups, at most ``max_groups``. -> StageWork (empty after ``wait_ms``)"""

    stage: str
    worker: WorkerId
    max_groups: int
    wait_ms: int = 1000
    host: str = ""
    """As in ``GetGroups``."""
    held: list[int] = msgspec.field(default_factory=list[int])
    """Tickets of groups that it has and goes on with. What else it was given here never came, and is given anew."""
    checks: bool = False
    """The worker checks the sha256 of every payload itself; else the shard does before it answers."""
    most_bytes: Count = 64 << 20
    """Of the answer's frames, but for its first group."""
    calls: Count = 0
    """Most calls of user code that the worker has under way at once; 0 where a model makes the columns."""


class StageItem(Part, frozen=True, kw_only=True):
    """One group for a stage; ``ticket`` fences a worker that was given up on."""

    group: GroupId
    lease: LeaseId
    ticket: int
    row: dict[str, Any]
    frames: list[TensorSpec]
    """What other stages made of it and this one needs. The packed payload is the frame behind these, or has a place."""
    sha: Sha
    """Of the packed payload."""
    place: Place | None = None


class StageWork(Message, frozen=True, kw_only=True):
    items: list[StageItem]
    folder: str = ""
    """Of the slabs."""
    waited_ms: Count = 0
    """So long there was nothing: the rest of the time the answer was on its way."""


class StageResult(Part, frozen=True, kw_only=True):
    """What a stage made of one group: float32 columns in frames, one value a sample, or the reason why it could not."""

    group: GroupId
    lease: LeaseId
    ticket: int
    frames: list[TensorSpec]
    error: str = ""


class PutStageResults(Message, frozen=True, kw_only=True):
    """-> Results, one a group"""

    stage: str
    worker: WorkerId
    results: list[StageResult]


class GetGroups(Message, frozen=True, kw_only=True):
    """Payload of sealed groups. -> Groups; refused when one is corrupt (it is quarantined and the batch changes)"""

    groups: list[GroupId]
    shas: list[str]
    host: str = ""
    """Kernel boot id of the reader, who maps what lies in slabs if it is the server's; empty: all comes in frames."""
    checks: bool = False
    """The reader checks the sha256 of every payload itself: each comes packed, as it is stored, and what stages made
    of all of them in one frame a column."""


class GroupFrames(Part, frozen=True, kw_only=True):
    """One group: all its arrays; or, for a reader that checks it, the packed payload."""

    group: GroupId
    row: dict[str, Any]
    frames: list[TensorSpec]
    place: Place | None = None
    """Where the packed payload lies."""
    packed: bool = False
    """Its one frame is the packed payload, whose sha256 nobody has checked."""


class MadeColumn(Part, frozen=True, kw_only=True):
    """A column that stages made, of all groups of an answer: their values one behind the other in one float32 frame."""

    name: str
    counts: list[Count]
    """Values of each group, in order; 0: it has no such column."""


class Groups(Message, frozen=True, kw_only=True):
    """In the order asked: the frames of the columns, then those of each group, one after the other."""

    groups: list[GroupFrames]
    folder: str = ""
    """Of the slabs."""
    columns: list[MadeColumn] = msgspec.field(default_factory=list[MadeColumn])
    """Of groups that come packed, or have a place; the others have theirs among their arrays."""
