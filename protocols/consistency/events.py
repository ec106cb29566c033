"""Inputs of the machine: what the world says happened or asks for. Closed, frozen, keyword-only."""

from dataclasses import dataclass

from staleflow.protocols.consistency.effects import DropWhy, ReleaseWhy
from staleflow.protocols.consistency.ids import (
    BatchId,
    GroupId,
    LeaseId,
    Lineage,
    Segment,
    Step,
    TrainerTerm,
    Version,
    WorkerId,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Publish:
    """The trainer publishes version 0. Every later version is published by ``Consume``."""

    trainer_term: TrainerTerm
    sha: str
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """A trainer takes over: at the newest version, or from an older checkpoint, which is a rollback."""

    trainer: WorkerId
    lineage: Lineage
    version: Version
    """Lineage and version of the weights that the trainer holds; (0, 0) before anything is published."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserve:
    """A worker is to produce ``group`` with the weights of ``version`` of the surviving lineage."""

    group: GroupId
    worker: WorkerId
    version: Version


@dataclass(frozen=True, slots=True, kw_only=True)
class Renew:
    """A holder is alive: all its leases live for another ``lease_ms``. Not traced, not stored."""

    worker: WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class Detach:
    """A worker said goodbye or was replaced: its leases are released at once."""

    worker: WorkerId
    why: ReleaseWhy


@dataclass(frozen=True, slots=True, kw_only=True)
class Push:
    """A shard has the payload of a group durably. Segments: ascending (lineage, version), all samples together."""

    group: GroupId
    lease: LeaseId
    worker: WorkerId
    shard: int
    sha: str
    nbytes: int
    truncated: bool
    segments: tuple[Segment, ...]
    sequence_tokens: int
    """Prompt and completion of all samples, those of an environment among them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Occupy:
    """The last stage of a group is done: it may train."""

    group: GroupId
    lease: LeaseId


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """A leased or pushed group is given up."""

    group: GroupId
    lease: LeaseId
    why: ReleaseWhy
    retire: bool = False
    """The group is never leased again, whatever the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drop:
    """An occupied group is given up."""

    group: GroupId
    why: DropWhy


@dataclass(frozen=True, slots=True, kw_only=True)
class Migrate:
    """A leased group moves to another worker: released (aborted) and reserved at the same version, atomically."""

    group: GroupId
    lease: LeaseId
    to: WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A streaming trainer takes an occupied group for ``step`` before the seal."""

    group: GroupId
    step: Step
    trainer_term: TrainerTerm


@dataclass(frozen=True, slots=True, kw_only=True)
class Deliver:
    """A sealed batch is handed to a trainer rank."""

    batch: BatchId
    trainer_term: TrainerTerm
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Consume:
    """Batch ``k`` is spent and version ``k + 1`` exists, atomically. The weights are already durable."""

    batch: BatchId
    step: Step
    trainer_term: TrainerTerm
    sha: str
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpointed:
    """The trainer can come back at ``version``; only the ``keep`` newest checkpoints are still needed (16 at most)."""

    trainer_term: TrainerTerm
    lineage: Lineage
    version: Version
    keep: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Quarantine:
    """The payload of a group is corrupt: it leaves, and a sealed batch that holds it is un-sealed first."""

    group: GroupId


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Time passes: leases of silent holders expire."""


Event = (
    Publish
    | Join
    | Reserve
    | Renew
    | Detach
    | Push
    | Occupy
    | Release
    | Drop
    | Migrate
    | Claim
    | Deliver
    | Consume
    | Checkpointed
    | Quarantine
    | Tick
)
