"""Messages to the scheduler: operations on groups, in batches."""

from staleflow.protocols.consistency.effects import Code, ReleaseWhy
from staleflow.protocols.consistency.ids import GroupId, LeaseId, Lineage, Segment, Version, WorkerId
from staleflow.protocols.wire.messages.base import Count, Message, Part, Sha


class RegisterPush(Message, frozen=True, kw_only=True):
    """Op of a shard: the payload is durable. A lease that may not push is refused with ``stale_lease`` or ``stale``."""

    group: GroupId
    lease: LeaseId
    worker: WorkerId
    shard: int
    sha: str
    nbytes: Count
    truncated: bool
    segments: list[Segment]
    samples: list[Count]
    """Number of tokens of each sample, for length metrics."""
    sequence_tokens: Count
    """Prompt and completion tokens of all samples, including an environment's: the load of a trainer's rank."""
    occupies: bool = False
    """The push has its rewards and no stage follows, so the scheduler also occupies the group."""
    reward: float | None = None
    """``occupies``: mean reward of the samples."""


class RegisterOccupy(Message, frozen=True, kw_only=True):
    """Op of a shard: the last stage is done."""

    group: GroupId
    lease: LeaseId
    reward: float | None = None
    """Mean reward of the samples."""


class RegisterRelease(Message, frozen=True, kw_only=True):
    """Op of a shard (filtered, or a stage failed permanently) or of a worker (aborted)."""

    group: GroupId
    lease: LeaseId
    why: ReleaseWhy
    detail: str = ""
    hopeless: bool = False
    """No retry can succeed: the worker's engine can never serve the group, for example because it is too long."""
    reward: float | None = None
    """Mean reward of the samples, if they have one."""


class RegisterQuarantine(Message, frozen=True, kw_only=True):
    """Op of a shard: the payload of this group is corrupt."""

    group: GroupId


class RegisterMissing(Message, frozen=True, kw_only=True):
    """Op of a shard: these requested bytes of a group are missing.

    No effect (``stale``) unless the ledger expects exactly these bytes on this shard.
    """

    group: GroupId
    shard: int
    sha: Sha


class RegisterReject(Message, frozen=True, kw_only=True):
    """Op of a shard: it refused pushes of this worker, which never reached the ledger. Traced, without other effect."""

    group: GroupId
    lease: LeaseId
    worker: WorkerId
    code: Code
    count: Count = 1
    """Number of refused pushes since the last such report of this worker and code; ``group`` is the newest."""


class RegisterYield(Message, frozen=True, kw_only=True):
    """Op of a worker that gives up a group: its shard has the samples so far, and another instance may continue them.

    Success: the lease has ended and the group is leased to another instance. ``stale_lease``: the lease had ended
    before. Any other code: nothing has changed, and the worker continues under the same lease.
    """

    group: GroupId
    lease: LeaseId
    lineage: Lineage
    """Lineage of ``version``."""
    version: Version
    """Newest version that wrote any of the samples; the lease's own if they are empty."""
    sha: Sha
    """Digest of the samples and their header on the shard (``partial_samples.partial_sha``)."""
    any_target: bool = False
    """The worker got no ``Yield``: the scheduler chooses an instance with a free place. The result ``busy`` means that
    all places are taken, and the next one of an instance is reserved for ten seconds: send the op again."""


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
    """Up to a few hundred operations, applied in order and independently of each other. -> Results"""

    ops: list[Op]


class Result(Part, frozen=True, kw_only=True):
    """Outcome of one operation. ``code`` None: done, now or earlier."""

    code: Code | None = None
    detail: str = ""


class Results(Message, frozen=True, kw_only=True):
    """One result for each operation, in order."""

    results: list[Result]


class GetRetained(Message, frozen=True, kw_only=True):
    """A shard requests which of these groups it must keep, and whether its leases are still valid. -> Retained"""

    shard: int
    groups: list[GroupId]


class Retained(Message, frozen=True, kw_only=True):
    """The groups of the request that must be kept; the others may be deleted."""

    keep: list[GroupId]


class GetExpected(Message, frozen=True, kw_only=True):
    """A shard that has started requests the payloads it must have, for groups above ``after``. -> Expected"""

    shard: int
    after: GroupId


class Expected(Message, frozen=True, kw_only=True):
    """Payloads that the ledger expects, ascending by group, one sha for each. Empty: no more groups follow."""

    groups: list[GroupId]
    shas: list[str]
