"""Outputs of the machine, in the order in which they must be carried out.

Every effect except ``Rejected`` and ``Truncate`` is a transition of the ledger: the shell stores it and its trace event
in one transaction before it sends any reply. Field names are those of the trace.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from staleflow.protocols.consistency.ids import BatchId, GroupId, LeaseId, Lineage, Step, TrainerTerm, Version, WorkerId

if TYPE_CHECKING:
    from staleflow.protocols.consistency.ids import Segment


class ReleaseWhy(StrEnum):
    """Reason why a leased or pushed group was given up."""

    EXPIRED = "expired"
    ABORTED = "aborted"
    FILTERED = "filtered"
    SURPLUS = "surplus"
    ROLLBACK = "rollback"
    OVERDUE = "overdue"


class DropWhy(StrEnum):
    """Reason why an occupied group was given up."""

    SURPLUS = "surplus"
    ROLLBACK = "rollback"
    QUARANTINE = "quarantine"
    OVERDUE = "overdue"


class Code(StrEnum):
    """Reason of a refusal. A refusal is a normal reply and changes nothing."""

    STALE_LEASE = "stale_lease"
    DUPLICATE = "duplicate"
    """The same request took effect before; the shell repeats its first reply."""
    CONFLICT = "conflict"
    FENCED = "fenced"
    BUSY = "busy"
    BAD_VERSION = "bad_version"
    DENIED = "denied"
    MALFORMED = "malformed"
    OVERSIZE = "oversize"
    STALE = "stale"


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    lineage: Lineage
    version: Version
    sha: str
    nbytes: int
    trainer_term: TrainerTerm


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    trainer: WorkerId
    trainer_term: TrainerTerm
    lineage: Lineage
    """Lineage and version of the checkpoint with which the trainer joined."""
    version: Version


@dataclass(frozen=True, slots=True, kw_only=True)
class RolledBack:
    lineage: Lineage
    from_lineage: Lineage
    to_version: Version
    trainer_term: TrainerTerm


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserved:
    group: GroupId
    lease: LeaseId
    worker: WorkerId
    lineage: Lineage
    version: Version
    deadline: Step | None
    spare: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Promoted:
    group: GroupId
    demoted: GroupId | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pushed:
    group: GroupId
    lease: LeaseId
    worker: WorkerId
    shard: int
    sha: str
    nbytes: int
    truncated: bool
    segments: "tuple[Segment, ...]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Occupied:
    group: GroupId


@dataclass(frozen=True, slots=True, kw_only=True)
class Released:
    group: GroupId
    lease: LeaseId
    worker: WorkerId
    tokens: int
    """Number of tokens known to be discarded; 0 if nothing was pushed."""
    why: ReleaseWhy
    pushed: bool
    """True if a stored payload must be discarded (not in the trace)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    group: GroupId
    tokens: int
    why: DropWhy


class Member(NamedTuple):
    """One group of a sealed batch; ``version`` is the oldest of the group."""

    group: GroupId
    lease: LeaseId
    lineage: Lineage
    version: Version
    sha: str
    shard: int
    """Trajectory server that stores the payload (not in the trace)."""
    nbytes: int
    """Size of the payload in bytes (not in the trace)."""
    sequence_tokens: int
    """Prompt and completion tokens of all samples (not in the trace)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sealed:
    batch: BatchId
    lineage: Lineage
    step: Step
    trainer_term: TrainerTerm
    members: tuple[Member, ...]
    tokens: int
    masked_tokens: int
    digest: str
    """Hex sha256 over the members in order; equal for the same members in the same order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claimed:
    group: GroupId
    step: Step


@dataclass(frozen=True, slots=True, kw_only=True)
class Unsealed:
    batch: BatchId
    why: DropWhy


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivered:
    batch: BatchId
    lineage: Lineage
    step: Step
    attempt: int
    trainer_term: TrainerTerm
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Consumed:
    batch: BatchId
    lineage: Lineage
    step: Step
    trainer_term: TrainerTerm


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointKept:
    """A checkpoint was registered. Lineage and version name the oldest checkpoint that the trainer can resume from."""

    lineage: Lineage
    version: Version
    trainer_term: TrainerTerm


@dataclass(frozen=True, slots=True, kw_only=True)
class Truncate:
    """Order the worker to finish this lease with the tokens it has (overdue policy ``truncate``). Not traced."""

    group: GroupId
    lease: LeaseId
    worker: WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """A normal refusal. Nothing changed."""

    op: str
    code: Code
    worker: WorkerId | None = None
    group: GroupId | None = None
    lease: LeaseId | None = None
    detail: str = ""


Effect = (
    Published
    | Joined
    | RolledBack
    | Reserved
    | Promoted
    | Pushed
    | Occupied
    | Released
    | Dropped
    | Sealed
    | Claimed
    | Unsealed
    | Delivered
    | Consumed
    | CheckpointKept
    | Truncate
    | Rejected
)
