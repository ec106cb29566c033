"""To the scheduler: operations on groups, in batches."""

from staleflow.protocols.consistency.effects import Code, ReleaseWhy
from staleflow.protocols.consistency.ids import GroupId, LeaseId, Lineage, Segment, Version, WorkerId
from staleflow.protocols.wire.messages.base import Count, Message, Part, Sha


class RegisterPush(Message, frozen=True, kw_only=True):
    """Op of a shard: the payload is durable. (A lease that may not push is refused ``stale_lease`` or ``stale``.)"""

    group: GroupId
    lease: LeaseId
    worker: WorkerId
    shard: int
    sha: str
    nbytes: Count
    truncated: bool
    segments: list[Segment]
    samples: list[Count]
    """Tokens of each sample, for length metrics."""
    sequence_tokens: Count
    """Prompt and completion of all samples, environments' tokens too: what a trainer's rank has to work through."""
    occupies: bool = False
    """It came with its rewards and no stage is to come: occupied in the same breath."""


class RegisterOccupy(Message, frozen=True, kw_only=True):
    """Op of a shard: the last stage is done."""

    group: GroupId
    lease: LeaseId


class RegisterRelease(Message, frozen=True, kw_only=True):
    """Op of a shard (filtered, a stage failed for good) or of a worker (aborted)."""

    group: GroupId
    lease: LeaseId
    why: ReleaseWhy
    detail: str = ""
    hopeless: bool = False
    """The worker's engine can never serve it: too long, say."""


class RegisterQuarantine(Message, frozen=True, kw_only=True):
    """Op of a shard: the payload of this group is corrupt."""

    group: GroupId


class RegisterMissing(Message, frozen=True, kw_only=True):
    """Op of a shard: it was asked for these bytes of a group and has not got them. No effect (``stale``) unless the
    ledger counts on exactly them, and on that shard."""

    group: GroupId
    shard: int
    sha: Sha


class RegisterReject(Message, frozen=True, kw_only=True):
    """Op of a shard: it refused pushes of this worker, which the ledger never saw. Traced, without any effect."""

    group: GroupId
    lease: LeaseId
    worker: WorkerId
    code: Code
    count: Count = 1
    """Pushes since the last such report of this worker and code; the group is that of the newest."""


class RegisterYield(Message, frozen=True, kw_only=True):
    """Op of a worker that was told to yield: its shard has the samples so far, another instance may go on with them.

    Done: the lease is over and the group is leased anew elsewhere. ``stale_lease``: it was over before. Any other code:
    nothing has changed, and the worker goes on under the same lease.
    """

    group: GroupId
    lease: LeaseId
    lineage: Lineage
    """Of ``version``."""
    version: Version
    """Newest that wrote any of it; the lease's own when nothing is written."""
    sha: Sha
    """Of the samples and their header, which the shard has (``partial_samples.partial_sha``)."""


Op = (
    RegisterPush
    | RegisterOccupy
    | RegisterRelease
    | RegisterQuarantine
    | RegisterMissing
    | RegisterReject
    | RegisterYield
)


class Operations(Message, frozen=True, kw_only=True):
    """Up to a few hundred operations, applied in order, each on its own. -> Results"""

    ops: list[Op]


class Result(Part, frozen=True, kw_only=True):
    """What became of one operation. ``code`` None: done, now or before."""

    code: Code | None = None
    detail: str = ""


class Results(Message, frozen=True, kw_only=True):
    """One result for each operation, in order."""

    results: list[Result]


class GetRetained(Message, frozen=True, kw_only=True):
    """A shard asks which of these groups it may forget, and whether its leases still hold. -> Retained"""

    shard: int
    groups: list[GroupId]


class Retained(Message, frozen=True, kw_only=True):
    """The groups of the question that must be kept; the others may go."""

    keep: list[GroupId]


class GetExpected(Message, frozen=True, kw_only=True):
    """A shard that has started asks for what it must have, of groups after that one. -> Expected"""

    shard: int
    after: GroupId


class Expected(Message, frozen=True, kw_only=True):
    """Payloads that the ledger counts on, ascending by group: one sha for each. None: there are no more."""

    groups: list[GroupId]
    shas: list[str]
