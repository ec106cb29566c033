"""One group and its state. Groups are plain records; the modules that move them hold the rules."""

from enum import IntEnum
from typing import Final, NamedTuple

from staleflow.protocols.consistency.effects import Member
from staleflow.protocols.consistency.ids import GroupId, LeaseId, Lineage, Segment, Step, Version, WorkerId


class State(IntEnum):
    """Position of a group in its life. The numbers are stored: never renumber."""

    LEASED = 0
    PUSHED = 1
    OCCUPIED = 2
    SEALED = 3
    CONSUMED = 4
    RELEASED = 5
    """Given up; may be leased again under a new lease."""
    DROPPED = 6
    """Given up for good, as are released groups that were filtered or surplus. No group is kept in this state."""


# Bare names for the hot modules: a lookup through the enum class costs five times as much.
LEASED: Final = State.LEASED
PUSHED: Final = State.PUSHED
OCCUPIED: Final = State.OCCUPIED
SEALED: Final = State.SEALED
CONSUMED: Final = State.CONSUMED
RELEASED: Final = State.RELEASED
DROPPED: Final = State.DROPPED

NO_STEP = Step(-1)
NO_CLAIM = -1


class Group:
    """The record of one group under its current lease. A new lease is a new record."""

    __slots__ = (
        "claim",
        "deadline",
        "granted_ms",
        "id",
        "lease",
        "lineage",
        "nbytes",
        "order",
        "segments",
        "sequence_tokens",
        "sha",
        "shard",
        "spare",
        "state",
        "step",
        "tokens",
        "truncated",
        "truncating",
        "version",
        "worker",
    )

    def __init__(
        self,
        id: GroupId,
        lease: LeaseId,
        worker: WorkerId,
        lineage: Lineage,
        version: Version,
        deadline: int,
        spare: bool,
    ) -> None:
        self.id = id
        self.lease = lease
        self.worker = worker
        self.lineage = lineage
        self.version = version
        self.deadline = deadline
        """Last step that may consume the group; always 0 under the token bound, which has a single bucket."""
        self.spare = spare
        self.state: State = LEASED
        self.granted_ms = 0
        self.truncating = False
        """A ``Truncate`` was emitted for this lease. In memory only, so that a restart emits it again."""
        self.order = 0
        """Sequence number of the occupation, kept through rollbacks; 0 before it."""
        self.claim = NO_CLAIM
        """Index among the claims of the next step."""
        self.step = NO_STEP
        """Step of the batch in which the group is sealed or was consumed."""
        self.shard = -1
        self.sha = ""
        self.nbytes = 0
        self.truncated = False
        self.segments: tuple[Segment, ...] = ()
        self.tokens = 0
        """Number of sampled tokens of all versions."""
        self.sequence_tokens = 0
        """Number of tokens of all samples, including those of prompts and environments."""

    @property
    def live(self) -> bool:
        return self.state <= OCCUPIED

    def newest(self) -> Version:
        """Return the newest version that wrote tokens of the group, as far as the ledger knows."""
        return max((segment.version for segment in self.segments), default=self.version)

    def masked(self, below: int) -> int:
        """Return the number of tokens of versions under ``below``."""
        return sum(segment.tokens for segment in self.segments if segment.version < below)

    def member(self) -> Member:
        return Member(
            self.id, self.lease, self.lineage, self.version, self.sha, self.shard, self.nbytes, self.sequence_tokens
        )


class GroupView(NamedTuple):
    """An immutable copy of the ledger's record of a group."""

    group: GroupId
    state: State
    lease: LeaseId
    worker: WorkerId
    lineage: Lineage
    version: Version
    granted_ms: int
    """Time of the lease's grant, by the clock of ``Machine.apply``. Not stored: 0 in a restored group that is not
    leased."""
    deadline: Step | None
    spare: bool
    claimed: bool
    step: Step | None
    shard: int
    """-1 before the push."""
    sha: str
    nbytes: int
    tokens: int
    truncated: bool
    segments: tuple[Segment, ...]


def view(group: Group, token_bound: bool) -> GroupView:
    return GroupView(
        group=group.id,
        state=group.state,
        lease=group.lease,
        worker=group.worker,
        lineage=group.lineage,
        version=group.version,
        granted_ms=group.granted_ms,
        deadline=None if token_bound else Step(group.deadline),
        spare=group.spare,
        claimed=group.claim != NO_CLAIM,
        step=None if group.step == NO_STEP else group.step,
        shard=group.shard,
        sha=group.sha,
        nbytes=group.nbytes,
        tokens=group.tokens,
        truncated=group.truncated,
        segments=group.segments,
    )
