"""Inputs of the machine: facts and requests from outside. A closed set of frozen, keyword-only dataclasses."""

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
    """A trainer takes over, at the newest version or from an older checkpoint; the latter is a rollback."""

    trainer: WorkerId
    lineage: Lineage
    version: Version
    """Lineage and version of the weights that the trainer holds; (0, 0) before the first publication."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserve:
    """Lease ``group`` to a worker, which produces it with the weights of ``version`` of the surviving lineage."""

    group: GroupId
    worker: WorkerId
    version: Version


@dataclass(frozen=True, slots=True, kw_only=True)
class Renew:
    """A holder is alive: extend all its leases to ``lease_ms`` from now. Not traced, not stored."""

    worker: WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class Detach:
    """A worker detached or was replaced: release its leases at once."""

    worker: WorkerId
    why: ReleaseWhy


@dataclass(frozen=True, slots=True, kw_only=True)
class Push:
    """A shard has stored the payload of a group durably.

    Segments are ascending by (lineage, version) and summed over all samples.
    """

    group: GroupId
    lease: LeaseId
    worker: WorkerId
    shard: int
    sha: str
    nbytes: int
    truncated: bool
    segments: tuple[Segment, ...]
    sequence_tokens: int
    """Prompt and completion tokens of all samples, including tokens of an environment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Occupy:
    """The last stage of a group is done; the group may be trained."""

    group: GroupId
    lease: LeaseId


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """Give up a leased or pushed group."""

    group: GroupId
    lease: LeaseId
    why: ReleaseWhy
    retire: bool = False
    """Retire the id for any reason of the release, so that the group is never leased again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drop:
    """Give up an occupied group."""

    group: GroupId
    why: DropWhy


@dataclass(frozen=True, slots=True, kw_only=True)
class Migrate:
    """Move a leased group to another worker: release it (aborted) and reserve it at the same version, atomically."""

    group: GroupId
    lease: LeaseId
    to: WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """Fix an occupied group as a member of ``step`` before the seal, for a streaming trainer."""

    group: GroupId
    step: Step
    trainer_term: TrainerTerm


@dataclass(frozen=True, slots=True, kw_only=True)
class Deliver:
    """Record the delivery of a sealed batch to a trainer rank."""

    batch: BatchId
    trainer_term: TrainerTerm
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Consume:
    """Consume batch ``k`` and publish version ``k + 1``, atomically. The weights are already durable."""

    batch: BatchId
    step: Step
    trainer_term: TrainerTerm
    sha: str
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpointed:
    """Register a checkpoint at ``version``. Only the ``keep`` newest checkpoints stay registered (16 at most)."""

    trainer_term: TrainerTerm
    lineage: Lineage
    version: Version
    keep: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Quarantine:
    """Remove a group with a corrupt payload. A sealed batch that holds the group is unsealed first."""

    group: GroupId


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Time has passed: expire the leases of silent holders."""


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
