"""The state of the ledger and the moves of a group. Moves keep counters, window, leases and rows in step; rules that
say *when* a move is right live in the files that call them.

Every move is written down as an effect in ``out``, in the order in which it happened.
"""

from collections.abc import Sequence

from staleflow.protocols.consistency.batches import Batch
from staleflow.protocols.consistency.effects import (
    Code,
    Dropped,
    DropWhy,
    Effect,
    Occupied,
    Pushed,
    Rejected,
    Released,
    ReleaseWhy,
    Reserved,
)
from staleflow.protocols.consistency.errors import TransitionError
from staleflow.protocols.consistency.events import Push
from staleflow.protocols.consistency.groups import (
    CONSUMED,
    DROPPED,
    LEASED,
    NO_CLAIM,
    OCCUPIED,
    PUSHED,
    RELEASED,
    SEALED,
    Group,
    State,
)
from staleflow.protocols.consistency.ids import (
    BatchId,
    GroupId,
    LeaseId,
    Lineage,
    Step,
    TrainerTerm,
    Version,
    WorkerId,
)
from staleflow.protocols.consistency.leases import Leases
from staleflow.protocols.consistency.limits import Limits
from staleflow.protocols.consistency.lineage import Lineages
from staleflow.protocols.consistency.retired import Retired
from staleflow.protocols.consistency.story import Story
from staleflow.protocols.consistency.window import Window

STEP_ROWS = 1 << 61
"""Key of the row of a step's batch: this plus the step."""
PAGE_ROWS = 1 << 62
"""Key of the row of a page of retired ids: this plus the page."""
RETIRING = (ReleaseWhy.FILTERED, ReleaseWhy.SURPLUS)
"""Reasons of release after which the id is not served again."""


class Ledger:
    """Everything that the machine knows."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.window = Window(limits)
        self.leases = Leases(limits.lease_ms)
        self.lineages = Lineages()
        self.retired = Retired()
        self.groups: dict[GroupId, Group] = {}
        self.batches: dict[Step, Batch] = {}
        """Sealed ones, and those consumed since the oldest checkpoint."""
        self.claims: list[Group] = []
        self.trainer_term = TrainerTerm(0)
        self.trainer = WorkerId("")
        self.joined = (Lineage(0), Version(0))
        """What the trainer came with."""
        self.checkpoints = [Version(0)]
        """Surviving checkpoints that the trainer can come back from, oldest first; version 0 is the initial model."""
        self.first_sha = ""
        self.newest_sha = ""
        self.consumed_batch = BatchId(0)
        """The batch that the newest version was trained on; 0 when it is version 0 or a rollback made it the newest."""
        self.attempts: dict[tuple[BatchId, int], int] = {}
        """Deliveries so far, by sealed batch and rank."""
        self.lease_hi = LeaseId(0)
        self.batch_hi = BatchId(0)
        self.order_hi = 0
        self.counts = [0] * len(State)
        """Groups now in each state; consumed counts those whose payload was forgotten, released and dropped stay 0."""
        self.reserves = self.releases = self.occupies = self.drops = 0
        self.stale_at: dict[int, list[Group]] = {}
        """Token bound: the step at which the trainable share of an occupied group falls below ``min_trainable``."""
        self.dirty: dict[int, None] = {}
        self.out: list[Effect] = []
        self.story = Story() if limits.debug else None

    @property
    def floor(self) -> Version:
        """The oldest checkpoint: no rollback goes below it, and its batch and all later ones are kept."""
        return self.checkpoints[0]

    # --- answers -------------------------------------------------------------------------------------------------

    def refuse(
        self,
        op: str,
        code: Code,
        detail: str = "",
        *,
        worker: WorkerId | None = None,
        group: GroupId | None = None,
        lease: LeaseId | None = None,
    ) -> None:
        self.out.append(Rejected(op=op, code=code, worker=worker, group=group, lease=lease, detail=detail))

    def illegal(self, message: str, group: GroupId | None = None) -> TransitionError:
        """The error for a caller that asks for what the state does not allow. To be raised before anything changes."""
        story = self.story.of(group) if self.story is not None and group is not None else ()
        return TransitionError(message, story)

    # --- moves ---------------------------------------------------------------------------------------------------

    def reserve(self, id: GroupId, worker: WorkerId, version: Version, spare: bool, now_ms: int) -> Group:
        self.lease_hi = lease = LeaseId(self.lease_hi + 1)
        window = self.window
        lineage = self.lineages.of(version)
        group = Group(id, lease, worker, lineage, version, window.deadline(version), spare)
        self.groups[id] = group
        self.leases.grant(group, now_ms)
        window.enter(group)
        self.counts[LEASED] += 1
        self.reserves += 1
        self.dirty[id] = None
        deadline = None if window.token_bound else Step(group.deadline)
        self.out.append(
            Reserved(
                group=id, lease=lease, worker=worker, lineage=lineage, version=version, deadline=deadline, spare=spare
            )
        )
        return group

    def push(self, group: Group, event: Push) -> None:
        self.window.pushed(group)
        self.leases.end(group)
        self._to(group, PUSHED)
        group.shard = event.shard
        group.sha = event.sha
        group.nbytes = event.nbytes
        group.truncated = event.truncated
        group.segments = event.segments
        group.tokens = sum(segment.tokens for segment in event.segments)
        group.sequence_tokens = event.sequence_tokens
        self.out.append(
            Pushed(
                group=group.id,
                lease=group.lease,
                worker=group.worker,
                shard=event.shard,
                sha=event.sha,
                nbytes=event.nbytes,
                truncated=event.truncated,
                segments=event.segments,
            )
        )

    def occupy(self, group: Group) -> None:
        self.window.leave(group)
        self._to(group, OCCUPIED)
        self.order_hi = group.order = self.order_hi + 1
        self.occupies += 1
        self.watch(group)
        self.window.enter(group)
        self.out.append(Occupied(group=group.id))

    def release(self, group: Group, why: ReleaseWhy, *, rebuilding: bool = False, retire: bool = False) -> None:
        """Give up a leased or pushed group, for good if ``retire`` or for some reasons. ``rebuilding``: the window is
        empty and will be filled anew."""
        pushed = group.state is PUSHED
        if not rebuilding:
            self.window.leave(group)
        if not pushed:
            self.leases.end(group)
        self.counts[group.state] -= 1
        group.state = RELEASED
        self.releases += 1
        self.dirty[group.id] = None
        if retire or why in RETIRING:
            self.retire(group.id)
        self.out.append(
            Released(
                group=group.id, lease=group.lease, worker=group.worker, tokens=group.tokens, why=why, pushed=pushed
            )
        )

    def drop(self, group: Group, why: DropWhy, *, rebuilding: bool = False) -> None:
        """Give up an occupied group for good."""
        if not rebuilding:
            self.window.leave(group)
        self.counts[OCCUPIED] -= 1
        group.state = DROPPED
        self.drops += 1
        self.dirty[group.id] = None
        self.retire(group.id)
        self.out.append(Dropped(group=group.id, tokens=group.tokens, why=why))

    def become(self, group: Group, *, spare: bool) -> None:
        """Change the role of a live group."""
        self.window.leave(group)
        group.spare = spare
        self.window.enter(group)
        self.dirty[group.id] = None

    def seal(self, groups: Sequence[Group], step: Step) -> None:
        """The caller took them out of the window. Their rows stay: that of the batch says that they are sealed."""
        for group in self.claims:
            group.claim = NO_CLAIM
            self.dirty[group.id] = None
        self.claims.clear()
        for group in groups:
            group.state = SEALED
            group.step = step
        self.counts[OCCUPIED] -= len(groups)
        self.counts[SEALED] += len(groups)

    def consume(self, groups: Sequence[Group]) -> None:
        for group in groups:
            group.state = CONSUMED
        self.counts[SEALED] -= len(groups)
        self.counts[CONSUMED] += len(groups)

    def bring_back(self, group: Group) -> None:
        """A sealed or consumed group is occupied again, counted, at its old place. The caller enters it."""
        self._to(group, OCCUPIED)
        group.step = Step(-1)
        self.watch(group)

    def claim(self, group: Group) -> None:
        """Fix the first occupied group as a member of the next batch."""
        self.window.take_first(group)
        group.claim = len(self.claims)
        self.claims.append(group)
        self.window.enter(group)
        self.dirty[group.id] = None

    def unclaim(self) -> None:
        for group in self.claims:
            self.window.leave(group)
            group.claim = NO_CLAIM
            self.window.enter(group)
            self.dirty[group.id] = None
        self.claims.clear()

    def retire(self, id: GroupId) -> None:
        """The id may never be used again; nothing else is remembered of it."""
        del self.groups[id]
        self.dirty[id] = None
        for page in self.retired.add(id):
            self.dirty[PAGE_ROWS + page] = None

    def forget_attempts(self, batch: BatchId) -> None:
        self.attempts = {key: count for key, count in self.attempts.items() if key[0] != batch}

    def watch(self, group: Group) -> None:
        """Note when too few tokens of an occupied group will be trainable."""
        limits = self.limits
        if not self.window.token_bound or not limits.min_trainable:
            return
        stale = 0
        for segment in sorted(group.segments, key=lambda segment: segment.version):
            stale += segment.tokens
            if group.tokens - stale < limits.min_trainable * group.tokens:
                self.stale_at.setdefault(segment.version + limits.max_staleness + 1, []).append(group)
                return

    def _to(self, group: Group, state: State) -> None:
        self._count(group, state)
        self.dirty[group.id] = None

    def _count(self, group: Group, state: State) -> None:
        self.counts[group.state] -= 1
        self.counts[state] += 1
        group.state = state
