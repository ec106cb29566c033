"""The ledger as reconstructed from a trace: plain records and counters, and the rules by name.

Deliberately independent of ``protocols.consistency``: an error of the ledger must not be repeated here.
"""

from collections import Counter
from collections.abc import Callable
from enum import IntEnum, StrEnum

from staleflow.trace import events as ev


class Rule(StrEnum):
    """Rules of the ledger. The number of checks of each is counted."""

    I1 = "no group is trained beyond the bound, and tokens that are too old are masked"
    I2 = "Hall's condition holds after every event"
    I3 = "a batch has exactly B groups, and a group is consumed at most once"
    I4 = "lease numbers are fresh, and only the current lease of a group can push"
    I5 = "versions are dense, published once, each with the consume of its step"
    I6 = "reserves and occupies are all accounted for"
    MOVE = "groups move only as the state table allows"
    VERSION = "leases and segments name published versions that survive, none older than the group's"
    ORDER = "a batch is the earliest deadlines, ties in order of occupation"
    FENCE = "no action is accepted under an old trainer term"
    ROLLBACK = "a rollback removes exactly the abandoned groups, and seals the replayed batch again unchanged"
    DELIVERY = "only sealed batches are delivered, and each attempt is counted"
    PULL = "an instance loads the published bytes"
    RECOVERY = "the state that an incarnation recovers and leaves matches the trace"
    PROGRESS = "a ready step is sealed at once"


class State(IntEnum):
    """State of a group. Released and dropped groups have no record."""

    LEASED = 0
    PUSHED = 1
    OCCUPIED = 2
    SEALED = 3
    CONSUMED = 4


class Group:
    """Record of one group."""

    __slots__ = (
        "claimed",
        "deadline",
        "lease",
        "lineage",
        "order",
        "segments",
        "sha",
        "spare",
        "state",
        "tokens",
        "version",
        "worker",
    )

    def __init__(self, e: ev.Reserve) -> None:
        self.state = State.LEASED
        self.lease, self.worker = e.lease, e.worker
        self.lineage, self.version = e.lineage, e.version
        self.deadline = 0 if e.deadline is None else int(e.deadline)
        self.spare = e.spare
        self.claimed = False
        self.order = 0
        self.sha = ""
        self.tokens = 0
        self.segments: list[ev.SegmentOf] = []

    def masked(self, below: int) -> int:
        """Return the number of tokens of versions under ``below``."""
        return sum(segment.tokens for segment in self.segments if segment.version < below)


class Batch:
    """A sealed batch that a later line may still refer to."""

    __slots__ = ("attempts", "consumed", "digest", "members", "step")

    def __init__(self, e: ev.Seal) -> None:
        self.step = int(e.step)
        self.members = [int(member.group) for member in e.members]
        self.digest = e.digest
        self.consumed = False
        self.attempts: Counter[int] = Counter()


class Ids:
    """A growing set of numbers, one bit each, in pages."""

    def __init__(self) -> None:
        self._pages: dict[int, int] = {}
        self._floor = 0
        """Every page below this one is full."""

    def add(self, number: int) -> None:
        page = number >> 12
        bits = self._pages.get(page, 0) | 1 << (number & 4095)
        self._pages[page] = bits
        while self._pages.get(self._floor) == (1 << 4096) - 1:
            del self._pages[self._floor]
            self._floor += 1

    def __contains__(self, number: int) -> bool:
        page = number >> 12
        return page < self._floor or bool(self._pages.get(page, 0) >> (number & 4095) & 1)


class Books:
    """All records and counters. ``fail`` takes a rule and the problem."""

    def __init__(self, fail: Callable[[Rule, str], None], checks: Counter[str]) -> None:
        self.fail = fail
        self._checks = checks
        self.settings: ev.Open | None = None
        self.groups: dict[int, Group] = {}
        self.states: Counter[State] = Counter()
        self.due: Counter[int] = Counter()
        """Counted live groups except claimed ones, by deadline."""
        self.due_occupied: Counter[int] = Counter()
        self.claimed: list[int] = []
        self.gone = Ids()
        """Groups that may never be leased again."""
        self.batches: dict[int, Batch] = {}
        """Batches that are not void, newest last; consumed ones until no kept checkpoint needs them."""
        self.batch_hi = self.lease_hi = self.term = self.order_hi = 0
        self.lineage = 0
        self.forks: dict[int, tuple[int, int]] = {}
        """lineage -> (lineage it forked from, version of the fork)."""
        self.version, self.step, self.kept = -1, 0, 0
        self.published: dict[tuple[int, int], str] = {}
        self.reserves = self.releases = self.occupies = self.drops = 0
        self.consumed_total = 0
        self.replaying = False
        """True if the next seal repeats a batch from before the rollback, even if other groups are due earlier by
        now."""

    def count(self, rule: Rule) -> None:
        """Count a check of ``rule``."""
        self._checks[rule.name] += 1

    def expect(self, rule: Rule, holds: bool, why: str) -> None:
        """Check a condition, for rules that are checked rarely enough to format ``why`` each time."""
        self._checks[rule.name] += 1
        if not holds:
            self.fail(rule, why)

    @property
    def batch_size(self) -> int:
        return 0 if self.settings is None else self.settings.batch_size

    @property
    def max_staleness(self) -> int:
        return 0 if self.settings is None else self.settings.max_staleness

    @property
    def token_bound(self) -> bool:
        return self.settings is not None and self.settings.bound == "token"

    # --- groups ----------------------------------------------------------------------------------------------

    def _weigh(self, group: Group, by: int) -> None:
        self.states[group.state] += by
        if group.state <= State.OCCUPIED and not group.spare and not group.claimed:
            self.due[group.deadline] += by
            if group.state is State.OCCUPIED:
                self.due_occupied[group.deadline] += by

    def enter(self, id: int, group: Group) -> None:
        self.groups[id] = group
        self._weigh(group, 1)

    def move(self, group: Group, state: State) -> None:
        self._weigh(group, -1)
        group.state = state
        self._weigh(group, 1)

    def set_spare(self, group: Group, *, spare: bool) -> None:
        self._weigh(group, -1)
        group.spare = spare
        self._weigh(group, 1)

    def claim(self, id: int, group: Group, *, claimed: bool) -> None:
        self._weigh(group, -1)
        group.claimed = claimed
        self._weigh(group, 1)
        if claimed:
            self.claimed.append(id)

    def unclaim(self) -> None:
        for id in self.claimed:
            if (group := self.groups.get(id)) is not None and group.claimed:
                self.claim(id, group, claimed=False)
        self.claimed.clear()

    def leave(self, id: int, group: Group, *, permanently: bool) -> None:
        self._weigh(group, -1)
        del self.groups[id]
        if permanently:
            self.gone.add(id)

    # --- the surviving history -------------------------------------------------------------------------------

    def survives(self, lineage: int, version: int) -> bool:
        """Return whether that version is part of the surviving history."""
        at, top = self.lineage, self.version
        while at != lineage:
            if at not in self.forks:
                return False
            at, fork = self.forks[at]
            top = min(top, fork)
        return version <= top

    def clean(self, group: Group) -> bool:
        """Return whether no part of a group was written by an abandoned version."""
        if not self.forks:
            return True
        return self.survives(group.lineage, group.version) and all(
            self.survives(segment.lineage, segment.version) for segment in group.segments
        )

    # --- the window ------------------------------------------------------------------------------------------

    def hall(self) -> str:
        """Return how Hall's condition is violated; empty if it holds."""
        total = len(self.claimed)
        for deadline in sorted(d for d, n in self.due.items() if n):
            total += self.due[deadline]
            if deadline < self.step:
                return f"a group that was due at step {deadline} is alive while step {self.step} is next"
            room = self.batch_size * (deadline - self.step + 1)
            if total > room:
                return f"{total} groups are due by step {deadline}, there is room for {room}"
        return ""

    def ready(self) -> bool:
        """Return whether the next step can be sealed: B groups are occupied, and the rest keeps Hall's condition."""
        seats = self.batch_size - len(self.claimed)
        if not self.term or self.step > self.version + 1 or self.due_occupied.total() < seats:
            return False
        if self.token_bound:
            return True
        rest = occupied = 0
        last = self.version + self.max_staleness
        for deadline in sorted(d for d, n in self.due.items() if n and self.step <= d <= last):
            rest += self.due[deadline]
            occupied += self.due_occupied[deadline]
            if rest - min(occupied, seats) > self.batch_size * (deadline - self.step):
                return False
        return True
