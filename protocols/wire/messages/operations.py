"""To the scheduler: operations on groups, in batches."""

from staleflow.protocols.consistency.effects import Code, ReleaseWhy
from staleflow.protocols.consistency.events import Segment
from staleflow.protocols.consistency.ids import GroupId, LeaseId, WorkerId
from staleflow.protocols.wire.messages.base import Message, Part


class RegisterPush(Message, frozen=True, kw_only=True):
    """Op of a shard: the payload is durable. (A lease that may not push is refused ``stale_lease`` or ``stale``.)"""

    group: GroupId
    lease: LeaseId
    worker: WorkerId
    shard: int
    sha: str
    nbytes: int
    truncated: bool
    segments: list[Segment]
    samples: list[int]
    """Tokens of each sample, for length metrics."""


class RegisterOccupy(Message, frozen=True, kw_only=True):
    """Op of a shard: the last stage is done."""

    group: GroupId
    lease: LeaseId
    reward_mean: float
    reward_std: float


class RegisterRelease(Message, frozen=True, kw_only=True):
    """Op of a shard (filtered, a stage failed for good) or of a worker (aborted)."""

    group: GroupId
    lease: LeaseId
    why: ReleaseWhy
    detail: str = ""


class RegisterQuarantine(Message, frozen=True, kw_only=True):
    """Op of a shard: the payload of this group is corrupt."""

    group: GroupId


Op = RegisterPush | RegisterOccupy | RegisterRelease | RegisterQuarantine


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


class Retention(Message, frozen=True, kw_only=True):
    """A shard asks which of these groups it may forget, and whether its leases still hold. -> Retained"""

    shard: int
    groups: list[GroupId]


class Retained(Message, frozen=True, kw_only=True):
    """The groups of the question that must be kept; the others may go."""

    keep: list[GroupId]
