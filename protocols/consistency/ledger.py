"""The state of the ledger and the moves of a group.

Moves keep counters, window, leases and rows consistent with each other. The calling modules decide *when* a move is
right. Every move appends its effect to ``out``, in the order in which the moves happen.
"""

from collections import deque
from collections.abc import Iterable, Sequence

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
from staleflow.protocols.consistency.window import Window

STEP_ROWS = 1 << 61
"""Key of the row of a step's batch: this plus the step."""
PAGE_ROWS = 1 << 62
"""Key of the row of a page of retired ids: this plus the page."""
RETIRING = (ReleaseWhy.FILTERED, ReleaseWhy.SURPLUS)
"""Reasons of release that retire the id."""

PAGE_BITS = 64
FULL_PAGE = (1 << PAGE_BITS) - 1
MAX_STORY_EFFECTS = 4096


class RetiredIds:
    """A set of group ids that may never be used again, one bit each. It only grows.

    The prompt cursor deals ids densely, epoch after epoch, so whole pages fill up. A full page at the floor is replaced
    by a higher floor. The set therefore keeps one page for every 64 ids of the current epochs, however long the run.
    """

    __slots__ = ("floor", "pages")

    def __init__(self) -> None:
        self.floor = 0
        """Every page below this one is full."""
        self.pages: dict[int, int] = {}

    def __contains__(self, id: int) -> bool:
        page = id // PAGE_BITS
        return page < self.floor or (page in self.pages and bool(self.pages[page] >> id % PAGE_BITS & 1))

    def add(self, id: int) -> list[int]:
        """Retire ``id``. Return the pages that changed or were removed."""
        page, bit = divmod(id, PAGE_BITS)
        if page < self.floor:
            return []
        self.pages[page] = self.pages.get(page, 0) | 1 << bit
        changed = [page]
        while self.pages.get(self.floor) == FULL_PAGE:
            del self.pages[self.floor]
            changed.append(self.floor)
            self.floor += 1
        return changed


class Lineages:
    """The surviving history of versions, newest lineage last.

    A version is named by (lineage, number). Each rollback to ``k`` starts a lineage whose first own version is
    ``k + 1``; the fork points decide which names survive. A fork that a later, deeper rollback cut off is removed, so
    the list is as short as the surviving history is simple.
    """

    __slots__ = ("current", "forks")

    def __init__(self, forks: Iterable[tuple[int, int]] = ((0, 0),)) -> None:
        self.forks = list(forks)
        """(lineage, its first own version), both ascending."""
        self.current = Lineage(self.forks[-1][0])

    def of(self, version: int) -> Lineage:
        """Return the lineage in which the surviving ``version`` was published."""
        for lineage, first in reversed(self.forks):
            if first <= version:
                return Lineage(lineage)
        return Lineage(0)

    def survives(self, lineage: int, version: int) -> bool:
        """Return True if (lineage, version) is part of the surviving history, published or not yet published."""
        if not 0 <= lineage <= self.current:
            return False
        for fork, first in self.forks:
            if fork > lineage:
                return version < first
        return True

    def fork(self, version: Version) -> Lineage:
        """Go back to ``version``: abandon all later versions and start a new lineage, which is returned."""
        self.current = Lineage(self.current + 1)
        while self.forks[-1][1] > version:
            self.forks.pop()
        self.forks.append((self.current, version + 1))
        return self.current


class Story:
    """A ring of the last effects, for the messages of errors. Kept in debug mode only."""

    __slots__ = ("_ring",)

    def __init__(self) -> None:
        self._ring: deque[Effect] = deque(maxlen=MAX_STORY_EFFECTS)

    def add(self, effects: tuple[Effect, ...]) -> None:
        self._ring.extend(effects)

    def of(self, group: int) -> tuple[str, ...]:
        """Return the effects that name ``group``, oldest first."""
        return tuple(repr(effect) for effect in self._ring if getattr(effect, "group", None) == group)


class Ledger:
    """The complete state of the machine."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.window = Window(limits)
        self.leases = Leases(limits.lease_ms)
        self.lineages = Lineages()
        self.retired = RetiredIds()
        self.groups: dict[GroupId, Group] = {}
        self.batches: dict[Step, Batch] = {}
        """Sealed batches, and those consumed since the oldest checkpoint."""
        self.claims: list[Group] = []
        self.trainer_term = TrainerTerm(0)
        self.trainer = WorkerId("")
        self.joined_with = (Lineage(0), Version(0))
        """Lineage and version of the weights with which the trainer joined."""
        self.checkpoints = [Version(0)]
        """Surviving checkpoints from which the trainer can resume, oldest first; version 0 is the initial model."""
        self.first_sha = ""
        self.newest_sha = ""
        self.consumed_batch = BatchId(0)
        """Batch that trained the newest version; 0 if that is version 0 or a rollback made it the newest."""
        self.attempts: dict[tuple[BatchId, int], int] = {}
        """Number of deliveries so far, by sealed batch and rank."""
        self.lease_hi = LeaseId(0)
        self.batch_hi = BatchId(0)
        self.order_hi = 0
        self.counts = [0] * len(State)
        """Number of groups in each state. Consumed includes retired groups; released and dropped stay 0."""
        self.reserves = self.releases = self.occupies = self.drops = 0
        self.stale_at: dict[int, list[Group]] = {}
        """Occupied groups by the step at which their trainable share falls below ``min_trainable`` (token bound)."""
        self.dirty: dict[int, None] = {}
        """Keys of changed rows: a dictionary because a set would not keep their order."""
        self.out: list[Effect] = []
        self.story = Story() if limits.debug else None

    @property
    def floor(self) -> Version:
        """The oldest checkpoint. No rollback goes below it, and all batches from its step on are kept."""
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
        """Return the error for an event that the state does not allow. Raise it before anything changes."""
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
        self.track_staleness(group)
        self.window.enter(group)
        self.out.append(Occupied(group=group.id))

    def release(self, group: Group, why: ReleaseWhy, *, rebuilding: bool = False, retire: bool = False) -> None:
        """Give up a leased or pushed group, and retire its id if ``retire`` is true or ``why`` is in ``RETIRING``.

        ``rebuilding`` means that the window is empty and will be refilled.
        """
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

    def set_role(self, group: Group, *, spare: bool) -> None:
        """Make a live group a spare or a counted group."""
        self.window.leave(group)
        group.spare = spare
        self.window.enter(group)
        self.dirty[group.id] = None

    def seal(self, groups: Sequence[Group], step: Step) -> None:
        """Seal groups that the caller has removed from the window.

        Their rows do not change: the row of the batch records that they are sealed.
        """
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

    def reoccupy(self, group: Group) -> None:
        """Make a sealed or consumed group occupied again, at its old place. The caller enters it into the window."""
        self._to(group, OCCUPIED)
        group.step = Step(-1)
        self.track_staleness(group)

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
        """Mark the id as never to be used again and discard the group's record."""
        del self.groups[id]
        self.dirty[id] = None
        for page in self.retired.add(id):
            self.dirty[PAGE_ROWS + page] = None

    def forget_attempts(self, batch: BatchId) -> None:
        self.attempts = {key: count for key, count in self.attempts.items() if key[0] != batch}

    def track_staleness(self, group: Group) -> None:
        """Record the step at which too few tokens of an occupied group will be trainable (token bound)."""
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
