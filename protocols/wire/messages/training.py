"""To the scheduler: the trainer, and the parameter server on its behalf."""

from typing import Annotated

import msgspec
from msgspec import Meta

from staleflow.protocols.consistency.ids import BatchId, GroupId, LeaseId, Lineage, Step, TrainerTerm, Version, WorkerId
from staleflow.protocols.wire.messages.base import Count, Message, Part


class ModelLimits(Message, frozen=True, kw_only=True):
    """What the model that is trained can read. 0: not known, or no limit."""

    vocabulary: Count = 0
    """Token ids are below it."""
    context: Count = 0
    """Tokens of prompt and completion together."""


class GetModelLimits(Message, frozen=True, kw_only=True):
    """A shard waits for the limits of the trainer that joined last, if they differ from ``known``. -> ModelLimits

    A refusal ``busy`` after ``wait_ms``: nothing new.
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
    """Newest published; -1 when version 0 is still to be published."""


class GetBatch(Message, frozen=True, kw_only=True):
    """The trainer waits for the sealed batch of ``step``. -> Batch, as soon as it is sealed, or NoMoreBatches

    A refusal ``busy`` after ``wait_ms`` says in ``detail`` why it still waits.
    """

    trainer_term: TrainerTerm
    step: Step
    rank: Annotated[int, Meta(ge=0, le=65_535)] = 0
    wait_ms: int = 1000


class CheckBatch(Message, frozen=True, kw_only=True):
    """Rank 0 is about to train a batch that has lain ready. -> Done, or Refusal ``conflict`` if it was taken back"""

    trainer_term: TrainerTerm
    step: Step
    batch: BatchId


class GetClaims(Message, frozen=True, kw_only=True):
    """A trainer that streams waits for more groups of ``step``. -> Claims, or Batch once the step is sealed, or
    NoMoreBatches

    What it is given is claimed: fixed as the beginning of the batch, in that order. It comes when ``count`` more are
    claimed, the rest with the sealed batch. Refusal ``conflict``: the batch no longer begins with what is held (a
    rollback, a corrupt group), the step begins again. ``busy`` as for ``GetBatch``.
    """

    trainer_term: TrainerTerm
    step: Step
    held: list[LeaseId]
    """Leases of the groups that it has already, in order."""
    count: Annotated[int, Meta(ge=1, le=1 << 20)]
    rank: Annotated[int, Meta(ge=0, le=65_535)] = 0
    wait_ms: int = 1000


class MemberRef(Part, frozen=True, kw_only=True):
    """Where a rank finds one group of its batch."""

    group: GroupId
    lease: LeaseId
    lineage: Lineage
    version: Version
    sha: str
    shard: int
    nbytes: int
    sequence_tokens: int


class Batch(Message, frozen=True, kw_only=True):
    """A sealed batch; equal byte for byte whenever it is asked for again, but for ``attempt``."""

    batch: BatchId
    lineage: Lineage
    step: Step
    attempt: int
    members: list[MemberRef]
    digest: str
    mask_below: Version
    """Token bound: tokens of older versions get loss mask 0. -1 under the trajectory bound."""


class NoMoreBatches(Message, frozen=True, kw_only=True):
    """The run drains, and this step gets no batch any more. The trainer saves and sends ``Finished``."""

    why: str
    """The reason of the drain."""


class Claims(Message, frozen=True, kw_only=True):
    """Groups of a batch that is not sealed, those after ``held``; equal whenever they are asked for again."""

    lineage: Lineage
    step: Step
    members: list[MemberRef]
    mask_below: Version
    """As of ``Batch``."""


class QuarantineGroups(Message, frozen=True, kw_only=True):
    """The trainer cannot train these groups of a batch: they are dropped, and the batch is sealed again. -> Done

    A group that is in no batch any more is passed over. Refusal ``denied`` once so many have failed in a row that the
    model or the algorithm is at fault: the run cannot go on.
    """

    trainer_term: TrainerTerm
    groups: list[GroupId]
    why: str


class RegisterVersion(Message, frozen=True, kw_only=True):
    """The parameter server has a version durably: version 0, or that of ``batch``, which is thereby consumed.

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
    """The trainer can come back at this version, and at the ``keep`` - 1 checkpoints that it registered before it.

    -> RegisterCheckpointReply, or Refusal ``fenced``, ``denied``, ``bad_version``, ``malformed``
    """

    trainer_term: TrainerTerm
    lineage: Lineage
    version: Version
    keep: int = 1


class RegisterCheckpointReply(Message, frozen=True, kw_only=True):
    """What only versions before ``oldest`` need is let go: no trainer can come back at them any more."""

    oldest: Version


class GetRetainedVersions(Message, frozen=True, kw_only=True):
    """The parameter server asks which versions it must keep. -> RetainedVersions"""


class RetainedVersions(Message, frozen=True, kw_only=True):
    """(lineage, version) of every version that a lease, an instance, a checkpoint or a rollback may still need."""

    versions: list[tuple[Lineage, Version]]


class Metrics(Message, frozen=True, kw_only=True):
    """Numbers for ``metrics.jsonl``; the trainer sends one a step and the scheduler adds its own. -> Done"""

    worker: WorkerId
    step: Step
    values: dict[str, float]


class Finished(Message, frozen=True, kw_only=True):
    """The trainer has done its last step (or gives up, with ``error``): the run drains. -> Done"""

    trainer_term: TrainerTerm
    error: str = ""
