"""Events of a trace, one struct per kind of line, and the conversion of the ledger's effects to lines.

The field names are the public contract; ``schema`` is raised when one changes. Fields that are ``UNSET`` are left out
of the line.
"""

from typing import Annotated, Literal, assert_never

from msgspec import UNSET, Meta, Struct, UnsetType, field

from staleflow.protocols.consistency import effects, ids
from staleflow.protocols.consistency.effects import DropWhy, Effect, ReleaseWhy
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


def event_of(effect: Effect) -> TraceEvent | None:
    """Return the line of an effect. ``Truncate`` and ``Rejected`` have none, because they change nothing."""
    match effect:
        case effects.Reserved() as e:
            return Reserve(
                group=e.group,
                lease=e.lease,
                worker=e.worker,
                lineage=e.lineage,
                version=e.version,
                deadline=e.deadline,
                spare=e.spare,
            )
        case effects.Pushed() as e:
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
        case effects.Occupied() as e:
            return Occupy(group=e.group)
        case effects.Released() as e:
            return Release(group=e.group, lease=e.lease, tokens=e.tokens, why=e.why)
        case effects.Dropped() as e:
            return Drop(group=e.group, tokens=e.tokens, why=e.why)
        case effects.Promoted() as e:
            return Promote(group=e.group, demoted=UNSET if e.demoted is None else e.demoted)
        case effects.Claimed() as e:
            return Claim(group=e.group, step=e.step)
        case effects.Sealed() as e:
            return Seal(
                batch=e.batch,
                lineage=e.lineage,
                step=e.step,
                trainer_term=e.trainer_term,
                members=[_member(member) for member in e.members],
                tokens=e.tokens,
                masked_tokens=e.masked_tokens,
                digest=e.digest,
            )
        case effects.Unsealed() as e:
            return Unseal(batch=e.batch, why=e.why)
        case effects.Delivered() as e:
            return Deliver(
                batch=e.batch,
                lineage=e.lineage,
                step=e.step,
                attempt=e.attempt,
                trainer_term=e.trainer_term,
                rank=e.rank,
            )
        case effects.Consumed() as e:
            return Consume(batch=e.batch, lineage=e.lineage, step=e.step, trainer_term=e.trainer_term)
        case effects.Published() as e:
            term = e.trainer_term
            return Publish(lineage=e.lineage, version=e.version, sha=e.sha, nbytes=e.nbytes, trainer_term=term)
        case effects.CheckpointKept() as e:
            return CheckpointKept(lineage=e.lineage, version=e.version, trainer_term=e.trainer_term)
        case effects.Joined() as e:
            checkpoint = Checkpoint(lineage=e.lineage, version=e.version)
            return Join(trainer=e.trainer, trainer_term=e.trainer_term, checkpoint=checkpoint)
        case effects.RolledBack() as e:
            before, to, term = e.from_lineage, e.to_version, e.trainer_term
            return Rollback(lineage=e.lineage, from_lineage=before, to_version=to, trainer_term=term)
        case effects.Truncate() | effects.Rejected():
            return None
        case _:
            assert_never(effect)


def _member(member: effects.Member) -> MemberOf:
    return MemberOf(
        group=member.group, lease=member.lease, lineage=member.lineage, version=member.version, sha=member.sha
    )
