"""Messages to the scheduler from the trainer, and from the parameter server on its behalf."""

from typing import Annotated

import msgspec
from msgspec import Meta

from staleflow.protocols.consistency.ids import BatchId, GroupId, LeaseId, Lineage, Step, TrainerTerm, Version, WorkerId
from staleflow.protocols.wire.messages.base import Count, Message, Part


class ModelLimits(Message, frozen=True, kw_only=True):
    """Input limits of the trained model. 0: unknown, or no limit."""

    vocabulary: Count = 0
    """Exclusive upper bound of token ids."""
    context: Count = 0
    """Maximum number of tokens of prompt and completion together."""
    moe_layers: Count = 0
    """Number of MoE layers, if the trainer replays the choices of their routers (``trainer.router_replay``)."""
    experts_per_token: Count = 0
    """Number of experts that each of them selects for a token."""
    experts: Count = 0
    """Number of experts of each of them."""


class GetModelLimits(Message, frozen=True, kw_only=True):
    """A shard waits for the limits of the trainer that joined last, if they differ from ``known``. -> ModelLimits

    Refused with ``busy`` after ``wait_ms`` without a change.
    """

    known: ModelLimits | None = None
    wait_ms: int = 1000


class Join(Message, frozen=True, kw_only=True):
    """A trainer takes over with the weights of (lineage, version). -> JoinReply, or Refusal ``bad_version``"""

    trainer: WorkerId
    lineage: Lineage
    version: Version
    model: ModelLimits = msgspec.field(default_factory=ModelLimits)


class JoinReply(Message, frozen=True, kw_only=True):
    trainer_term: TrainerTerm
    lineage: Lineage
    """Surviving lineage after the join."""
    version: Version
    """Newest published version; -1 if version 0 is still to be published."""


class GetBatch(Message, frozen=True, kw_only=True):
    """The trainer waits for the sealed batch of ``step``. -> Batch, as soon as it is sealed, or NoMoreBatches

    Refused with ``busy`` after ``wait_ms``; ``detail`` gives the reason why the batch is not sealed yet.
    """

    trainer_term: TrainerTerm
    step: Step
    rank: Annotated[int, Meta(ge=0, le=65_535)] = 0
    wait_ms: int = 1000
    waiting: bool = False
    """The trainer has nothing to train until this batch comes, although the version of the step before is not published
    yet. Otherwise, a request for the batch of a later step than the next one prefetches."""


class CheckBatch(Message, frozen=True, kw_only=True):
    """Rank 0 is about to train a prefetched batch. -> Done, or Refusal ``conflict`` if the batch was unsealed"""

    trainer_term: TrainerTerm
    step: Step
    batch: BatchId


class GetClaims(Message, frozen=True, kw_only=True):
    """A streaming trainer waits for more groups of ``step``.

    -> Claims, or Batch once the step is sealed, or NoMoreBatches

    The groups in the reply are claimed: fixed as the start of the batch, in that order. The reply is sent once
    ``count`` more groups are claimed; the rest comes with the sealed batch. Refusal ``conflict``: the batch no longer
    starts with the groups in ``held`` (a rollback, a corrupt group), and the step must restart. ``busy`` as for
    ``GetBatch``.
    """

    trainer_term: TrainerTerm
    step: Step
    held: list[LeaseId]
    """Leases of the groups that the trainer already has, in order."""
    count: Annotated[int, Meta(ge=1, le=1 << 20)]
    rank: Annotated[int, Meta(ge=0, le=65_535)] = 0
    wait_ms: int = 1000


class MemberRef(Part, frozen=True, kw_only=True):
    """Identity, location and size of one group of a batch."""

    group: GroupId
    lease: LeaseId
    lineage: Lineage
    version: Version
    sha: str
    shard: int
    nbytes: int
    sequence_tokens: int


class Batch(Message, frozen=True, kw_only=True):
    """A sealed batch. Repeated requests get an identical reply, byte for byte, except for ``attempt``."""

    batch: BatchId
    lineage: Lineage
    step: Step
    attempt: int
    members: list[MemberRef]
    digest: str
    mask_below: Version
    """Token bound: tokens of older versions get loss mask 0. -1 under the trajectory bound."""


class NoMoreBatches(Message, frozen=True, kw_only=True):
    """The run drains and this step will get no batch. The trainer saves and sends ``Finished``."""

    why: str
    """Reason for the drain."""


class Claims(Message, frozen=True, kw_only=True):
    """Groups of an unsealed batch, those after ``held``. Repeated requests get the same groups."""

    lineage: Lineage
    step: Step
    members: list[MemberRef]
    mask_below: Version
    """As in ``Batch``."""


class QuarantineGroups(Message, frozen=True, kw_only=True):
    """The trainer cannot train these groups of a batch: they are dropped, and the batch is sealed again. -> Done

    Groups that are no longer in a batch are ignored. Refusal ``denied`` once so many groups have failed in a row that
    the model or the algorithm is at fault and the run cannot continue.
    """

    trainer_term: TrainerTerm
    groups: list[GroupId]
    why: str


class RegisterVersion(Message, frozen=True, kw_only=True):
    """The parameter server has stored a version durably: version 0, or the one of ``batch``, which this consumes.

    -> RegisterVersionReply, or Refusal ``fenced``, ``bad_version``, ``conflict``
    """

    trainer_term: TrainerTerm
    lineage: Lineage
    version: Version
    batch: BatchId | None
    sha: str
    nbytes: int


class RegisterVersionReply(Message, frozen=True, kw_only=True):
    lineage: Lineage
    version: Version


class RegisterCheckpoint(Message, frozen=True, kw_only=True):
    """The trainer can resume from this version, and from the ``keep`` - 1 checkpoints that it registered before.

    -> RegisterCheckpointReply, or Refusal ``fenced``, ``denied``, ``bad_version``, ``malformed``
    """

    trainer_term: TrainerTerm
    lineage: Lineage
    version: Version
    keep: int = 1


class RegisterCheckpointReply(Message, frozen=True, kw_only=True):
    """No trainer can resume from a version before ``oldest`` any more; data that only they need is deleted."""

    oldest: Version


class GetRetainedVersions(Message, frozen=True, kw_only=True):
    """The parameter server requests the versions that it must keep. -> RetainedVersions"""

    stored: list[tuple[Lineage, Version]] = msgspec.field(default_factory=list[tuple[Lineage, Version]])
    """(lineage, version) of every registered version that it has."""


class RetainedVersions(Message, frozen=True, kw_only=True):
    """(lineage, version) of every version that a lease, an instance, a checkpoint or a rollback may still need."""

    versions: list[tuple[Lineage, Version]]
    lineage: Lineage = Lineage(0)
    """Newest lineage of the run."""
    surviving: list[tuple[Lineage, Version]] = msgspec.field(default_factory=list[tuple[Lineage, Version]])
    """The versions of the request that no rollback has abandoned."""


class Metrics(Message, frozen=True, kw_only=True):
    """Metrics for ``metrics.jsonl``. The trainer sends one message a step and the scheduler adds its own. -> Done"""

    worker: WorkerId
    step: Step
    values: dict[str, float]


class Finished(Message, frozen=True, kw_only=True):
    """The trainer has finished its last step, or failed with ``error``; the run drains. -> Done"""

    trainer_term: TrainerTerm
    error: str = ""
