"""Events of a trace, one struct per kind of line, and the conversion of the ledger's effects to lines.

The field names are the public contract; ``schema`` is raised when one changes. Fields that are ``UNSET`` are left out
of the line.
"""

from collections.abc import Callable
from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType, field

from staleflow.protocols.consistency import effects, ids
from staleflow.protocols.consistency.effects import DropWhy, ReleaseWhy
from staleflow.protocols.consistency.ids import WorkerId
from staleflow.protocols.consistency.limits import Bound, OnOverdue

SCHEMA = 1

_EXACT = Meta(ge=-(2**50), le=2**50)
"""Readers may rely on a float to hold the number, and half of it, exactly. This does not apply to values that only a
peer reported: sizes, shards, and refused requests."""
Whole = Annotated[int, _EXACT]
Size = Annotated[int, Meta(ge=1, le=2**50)]
Share = Annotated[float, Meta(ge=0, le=2**50)]
BatchId = Annotated[ids.BatchId, _EXACT]
GroupId = Annotated[ids.GroupId, _EXACT]
LeaseId = Annotated[ids.LeaseId, _EXACT]
Lineage = Annotated[ids.Lineage, _EXACT]
Step = Annotated[ids.Step, _EXACT]
TrainerTerm = Annotated[ids.TrainerTerm, _EXACT]
Version = Annotated[ids.Version, _EXACT]


class TraceEvent(Struct, frozen=True, kw_only=True, tag_field="ev"):
    """Base of all events of a trace."""


class Recovered(Struct, frozen=True, kw_only=True):
    """State that an incarnation recovered from the store."""

    reserved: Whole
    occupied: Whole
    sealed: Whole
    last_seq: Whole
    lineage: Lineage
    version: Version


class Checkpoint(Struct, frozen=True, kw_only=True):
    lineage: Lineage
    version: Version


class SegmentOf(Struct, frozen=True, kw_only=True):
    lineage: Lineage
    version: Version
    tokens: Whole


class MemberOf(Struct, frozen=True, kw_only=True):
    group: GroupId
    lease: LeaseId
    lineage: Lineage
    version: Version
    sha: str


class Open(TraceEvent, frozen=True, kw_only=True, tag="open"):
    max_staleness: Whole
    batch_size: Size
    group_size: Size
    bound: Bound
    min_trainable: float
    on_overdue: OnOverdue
    lease_ms: Whole
    protocol: Whole
    config_sha: str
    recovered: Recovered


class Auth(TraceEvent, frozen=True, kw_only=True, tag="auth"):
    peer: str
    role: str
    ok: bool
    why: str
    count: Whole


class Attach(TraceEvent, frozen=True, kw_only=True, tag="attach"):
    worker: WorkerId
    role: str
    why: str


class Detach(TraceEvent, frozen=True, kw_only=True, tag="detach"):
    worker: WorkerId
    role: str
    why: str


class Publish(TraceEvent, frozen=True, kw_only=True, tag="publish"):
    lineage: Lineage
    version: Version
    sha: str
    nbytes: int = field(name="bytes")
    trainer_term: TrainerTerm


class Pull(TraceEvent, frozen=True, kw_only=True, tag="pull"):
    worker: WorkerId
    lineage: ids.Lineage
    """As reported by the worker, unchecked; so is the version."""
    version: ids.Version
    sha: str
    ok: bool


class Join(TraceEvent, frozen=True, kw_only=True, tag="join"):
    trainer: WorkerId
    trainer_term: TrainerTerm
    checkpoint: Checkpoint


class Rollback(TraceEvent, frozen=True, kw_only=True, tag="rollback"):
    lineage: Lineage
    from_lineage: Lineage
    to_version: Version
    trainer_term: TrainerTerm


class Reserve(TraceEvent, frozen=True, kw_only=True, tag="reserve"):
    group: GroupId
    lease: LeaseId
    worker: WorkerId
    lineage: Lineage
    version: Version
    deadline: Step | None
    spare: bool


class Promote(TraceEvent, frozen=True, kw_only=True, tag="promote"):
    group: GroupId
    demoted: GroupId | UnsetType = UNSET


class Push(TraceEvent, frozen=True, kw_only=True, tag="push"):
    group: GroupId
    lease: LeaseId
    worker: WorkerId
    shard: int
    sha: str
    nbytes: int = field(name="bytes")
    truncated: bool
    segments: list[SegmentOf]

    @property
    def tokens(self) -> int:
        """Number of sampled tokens of all versions."""
        return sum(segment.tokens for segment in self.segments)


class Occupy(TraceEvent, frozen=True, kw_only=True, tag="occupy"):
    group: GroupId


class Release(TraceEvent, frozen=True, kw_only=True, tag="release"):
    group: GroupId
    lease: LeaseId
    tokens: Whole
    why: ReleaseWhy


class Drop(TraceEvent, frozen=True, kw_only=True, tag="drop"):
    group: GroupId
    tokens: Whole
    why: DropWhy


class Seal(TraceEvent, frozen=True, kw_only=True, tag="seal"):
    batch: BatchId
    lineage: Lineage
    step: Step
    trainer_term: TrainerTerm
    members: list[MemberOf]
    tokens: Whole
    masked_tokens: Whole
    digest: str


class Claim(TraceEvent, frozen=True, kw_only=True, tag="claim"):
    group: GroupId
    step: Step


class Unseal(TraceEvent, frozen=True, kw_only=True, tag="unseal"):
    batch: BatchId
    why: DropWhy


class Deliver(TraceEvent, frozen=True, kw_only=True, tag="deliver"):
    batch: BatchId
    lineage: Lineage
    step: Step
    attempt: Whole
    trainer_term: TrainerTerm
    rank: Whole


class Consume(TraceEvent, frozen=True, kw_only=True, tag="consume"):
    batch: BatchId
    lineage: Lineage
    step: Step
    trainer_term: TrainerTerm


class CheckpointKept(TraceEvent, frozen=True, kw_only=True, tag="checkpoint"):
    """A checkpoint was registered. Lineage and version are those of the oldest kept one: no rollback goes below it."""

    lineage: Lineage
    version: Version
    trainer_term: TrainerTerm


class Reject(TraceEvent, frozen=True, kw_only=True, tag="reject"):
    op: str
    worker: str
    group: ids.GroupId | UnsetType = UNSET
    """As reported by the peer, unchecked; so is the lease."""
    lease: ids.LeaseId | UnsetType = UNSET
    count: Whole
    code: str


class Overload(TraceEvent, frozen=True, kw_only=True, tag="overload"):
    on: bool
    resource: Literal["map", "disk", "read-only", "failing"]
    used: Share
    limit: Share


class Close(TraceEvent, frozen=True, kw_only=True, tag="close"):
    why: str
    reserved: Whole
    occupied: Whole


AnyEvent = (
    Open
    | Auth
    | Attach
    | Detach
    | Publish
    | Pull
    | Join
    | Rollback
    | Reserve
    | Promote
    | Push
    | Occupy
    | Release
    | Drop
    | Seal
    | Claim
    | Unseal
    | Deliver
    | Consume
    | CheckpointKept
    | Reject
    | Overload
    | Close
)


def _push(e: effects.Pushed) -> TraceEvent:
    return Push(
        group=e.group,
        lease=e.lease,
        worker=e.worker,
        shard=e.shard,
        sha=e.sha,
        nbytes=e.nbytes,
        truncated=e.truncated,
        segments=[SegmentOf(lineage=s[0], version=s[1], tokens=s[2]) for s in e.segments],
    )


def _seal(e: effects.Sealed) -> TraceEvent:
    return Seal(
        batch=e.batch,
        lineage=e.lineage,
        step=e.step,
        trainer_term=e.trainer_term,
        members=[
            MemberOf(group=m.group, lease=m.lease, lineage=m.lineage, version=m.version, sha=m.sha) for m in e.members
        ],
        tokens=e.tokens,
        masked_tokens=e.masked_tokens,
        digest=e.digest,
    )


def _join(e: effects.Joined) -> TraceEvent:
    checkpoint = Checkpoint(lineage=e.lineage, version=e.version)
    return Join(trainer=e.trainer, trainer_term=e.trainer_term, checkpoint=checkpoint)


def _publish(e: effects.Published) -> TraceEvent:
    return Publish(lineage=e.lineage, version=e.version, sha=e.sha, nbytes=e.nbytes, trainer_term=e.trainer_term)


def _rollback(e: effects.RolledBack) -> TraceEvent:
    return Rollback(
        lineage=e.lineage, from_lineage=e.from_lineage, to_version=e.to_version, trainer_term=e.trainer_term
    )


def _reserve(e: effects.Reserved) -> TraceEvent:
    return Reserve(
        group=e.group,
        lease=e.lease,
        worker=e.worker,
        lineage=e.lineage,
        version=e.version,
        deadline=e.deadline,
        spare=e.spare,
    )


def _promote(e: effects.Promoted) -> TraceEvent:
    return Promote(group=e.group, demoted=UNSET if e.demoted is None else e.demoted)


def _occupy(e: effects.Occupied) -> TraceEvent:
    return Occupy(group=e.group)


def _release(e: effects.Released) -> TraceEvent:
    return Release(group=e.group, lease=e.lease, tokens=e.tokens, why=e.why)


def _drop(e: effects.Dropped) -> TraceEvent:
    return Drop(group=e.group, tokens=e.tokens, why=e.why)


def _claim(e: effects.Claimed) -> TraceEvent:
    return Claim(group=e.group, step=e.step)


def _unseal(e: effects.Unsealed) -> TraceEvent:
    return Unseal(batch=e.batch, why=e.why)


def _deliver(e: effects.Delivered) -> TraceEvent:
    return Deliver(
        batch=e.batch, lineage=e.lineage, step=e.step, attempt=e.attempt, trainer_term=e.trainer_term, rank=e.rank
    )


def _consume(e: effects.Consumed) -> TraceEvent:
    return Consume(batch=e.batch, lineage=e.lineage, step=e.step, trainer_term=e.trainer_term)


def _checkpoint(e: effects.CheckpointKept) -> TraceEvent:
    return CheckpointKept(lineage=e.lineage, version=e.version, trainer_term=e.trainer_term)


EVENT_OF: dict[type, Callable[[Any], TraceEvent]] = {
    effects.Published: _publish,
    effects.Joined: _join,
    effects.RolledBack: _rollback,
    effects.Reserved: _reserve,
    effects.Promoted: _promote,
    effects.Pushed: _push,
    effects.Occupied: _occupy,
    effects.Released: _release,
    effects.Dropped: _drop,
    effects.Sealed: _seal,
    effects.Claimed: _claim,
    effects.Unsealed: _unseal,
    effects.Delivered: _deliver,
    effects.Consumed: _consume,
    effects.CheckpointKept: _checkpoint,
}
"""Converts each effect to its line. ``Truncate`` and ``Refused`` have none, because they change nothing."""
