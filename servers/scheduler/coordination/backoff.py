"""Failures by instance and by prompt: which instance is held back, and when a prompt is given up for good.

An instance that fails every group at once always has free places, so a strategy would serve it first and it would burn
the prompt source. Its streak of failures holds it back, with exponential back-off, until it pushes a group.

A failure counts as a try of its prompt only while its instance (or the stages) works otherwise: a broken instance must
not cost a prompt. All of this is kept in memory; after a restart of the scheduler the counts start again.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from staleflow.protocols.consistency.effects import Occupied, Pushed, Released, ReleaseWhy
from staleflow.protocols.consistency.groups import GroupView, State
from staleflow.protocols.consistency.ids import GroupId, WorkerId
from staleflow.protocols.wire.messages import RegisterRelease
from staleflow.servers.scheduler.coordination.instances import Instances
from staleflow.servers.scheduler.coordination.sentences import Hold
from staleflow.servers.scheduler.ledger.interpreter import Interpreter

log = logging.getLogger(__name__)

HOLD_AFTER = 8
"""Prompts that an instance fails one after the other, without a push, before it counts as failing."""
LEASES_PER_FAILURE = 0.5
"""Leases that an instance may still work on for each failure and count as failing. Failures are fast and groups take
minutes: before its first push a healthy instance fails each bad prompt among those it works on."""
FIRST_HOLD_MS, MAX_HOLD_MS = 1_000, 30_000
"""First and longest hold; each one is twice as long as the one before."""
PROBE = 1
"""Groups at a time for a failing instance that is not on hold."""
MAX_TRIES = 3
"""Failures after which a prompt is given up where no other instance could try it, or in the stages."""
MAX_PROMPTS = 1_000
"""Different prompts that are counted in one streak: more than chance, however many prompts there are."""
MAX_TRIED = 65_536
"""Prompts whose failures are remembered."""
MAX_STREAKS = 4_096
"""Instances whose failures are remembered."""
MAX_DETAIL = 500
"""Characters of a reason."""


@dataclass(slots=True)
class Streak:
    """Failures in a row, without a success in between."""

    count: int = 0
    prompts: set[int] = field(default_factory=set[int])
    """Distinct rows of the prompt source among them, at most ``MAX_PROMPTS``."""
    hopeless: bool = True
    """The engine refused each of them for good."""
    detail: str = ""
    first_ms: int = 0
    failing: bool = False
    hold_ms: int = 0
    until_ms: int = 0
    """End of the newest hold."""

    def add(self, prompt: int, detail: str, now_ms: int, *, hopeless: bool) -> None:
        self.first_ms = self.first_ms if self.count else now_ms
        self.count += 1
        self.hopeless = self.hopeless and hopeless
        self.detail = detail[:MAX_DETAIL]
        if len(self.prompts) < MAX_PROMPTS:
            self.prompts.add(prompt)

    def look(self, rows: int, working: int) -> None:
        """Decide whether it fails by now, with ``working`` groups that may still succeed; only a success ends that."""
        many = len(self.prompts) >= min(HOLD_AFTER, rows) or self.count >= HOLD_AFTER * MAX_TRIES
        self.failing = self.failing or (many and working <= LEASES_PER_FAILURE * self.count)


@dataclass(slots=True)
class Tried:
    """Failures of one group."""

    count: int = 0
    tries: int = 0
    """Those that count against its prompt."""
    instances: set[str] = field(default_factory=set[str])
    """Names of the instances of these."""


class Failures:
    """Notes every group that is given up, and every success."""

    def __init__(self, interpreter: Interpreter, instances: Instances, name_of: Callable[[WorkerId], str]) -> None:
        self._interpreter = interpreter
        self._instances = instances
        self._name_of = name_of
        self._streaks: dict[WorkerId, Streak] = {}
        self._staged = Streak()
        self._tried: dict[GroupId, Tried] = {}
        self._seen: dict[WorkerId, tuple[bool, bool]] = {}
        """What strategies were shown of each failing instance."""
        self.newest_given_up = ""
        """Reason of the newest prompt that was given up for good."""
        interpreter.listen(Pushed, self._pushed)
        interpreter.listen(Occupied, self._occupied)

    # --- prompts ---------------------------------------------------------------------------------------------

    def exhausts(self, held: GroupView) -> bool:
        """Whether a failure of this group now is its last: it failed at two instances, or often enough at the only one,
        while other prompts succeed there."""
        staged, totals = held.state is State.PUSHED, self._interpreter.totals.counts
        streak = self._staged if staged else self._streaks.get(held.worker)
        if (streak is not None and streak.failing) or not (totals.occupies if staged else totals.pushes):
            return False
        tried = self._tried.get(held.group) or Tried()
        if staged:
            return tried.tries + 1 >= MAX_TRIES
        others = any(other.worker != held.worker and not self.fails(other.worker) for other in self._instances)
        return bool(tried.instances - {self._name_of(held.worker)}) or tried.tries + 1 >= MAX_TRIES * (1 + others)

    def tried(self, group: GroupId) -> int:
        """How often a group failed in this incarnation of the scheduler."""
        tried = self._tried.get(group)
        return 0 if tried is None else tried.count

    def released(self, op: RegisterRelease, effect: Released, *, retired: bool) -> None:
        """A worker or a shard gave a group up. ``retired``: for good."""
        if op.why is not ReleaseWhy.ABORTED:
            return
        now_ms, rows = self._interpreter.clock.now_ms(), max(self._interpreter.deck.rows, 1)
        streak = self._staged if effect.pushed else self._streak(effect.worker)
        if retired:
            self._tried.pop(effect.group, None)
            self.newest_given_up = op.detail[:MAX_DETAIL]
        else:
            self._try(effect, counts=not streak.failing)
        streak.add(effect.group % rows, op.detail, now_ms, hopeless=op.hopeless)
        if effect.pushed:
            streak.look(rows, self._interpreter.machine.state_counts()["pushed"])
            return
        instance = self._instances.get(effect.worker)
        streak.look(rows, 0 if instance is None else len(instance.leases))
        self._hold(effect.worker, streak, now_ms)

    def _try(self, effect: Released, *, counts: bool) -> None:
        tried = self._tried.setdefault(effect.group, Tried())
        tried.count += 1
        tried.tries += counts
        if counts and not effect.pushed:
            tried.instances.add(self._name_of(effect.worker))
        if len(self._tried) > MAX_TRIED:
            del self._tried[next(iter(self._tried))]

    def _streak(self, worker: WorkerId) -> Streak:
        streak = self._streaks.setdefault(worker, Streak())
        if len(self._streaks) > MAX_STREAKS:
            del self._streaks[next(iter(self._streaks))]
        return streak

    def _pushed(self, effect: Pushed) -> None:
        if self._streaks.pop(effect.worker, None) is not None:
            self.look()

    def _occupied(self, effect: Occupied) -> None:
        self._tried.pop(effect.group, None)
        if self._staged.count:
            self._staged = Streak()

    # --- instances -------------------------------------------------------------------------------------------

    def fails(self, worker: WorkerId) -> bool:
        """Whether an instance fails group after group."""
        streak = self._streaks.get(worker)
        return streak is not None and streak.failing

    def on_hold(self, worker: WorkerId) -> bool:
        """Whether an instance starts nothing for now."""
        return self.on_trial(worker) and self._interpreter.clock.now_ms() < self._streaks[worker].until_ms

    def on_trial(self, worker: WorkerId) -> bool:
        """Whether an instance is held back: on hold, or allowed ``PROBE`` groups at a time.

        One that only refuses prompts is not, unless another instance does better: the prompts may be at fault, and
        refusing the bad ones is the way to the good ones.
        """
        streak = self._streaks.get(worker)
        if streak is None or not streak.failing:
            return False
        return not streak.hopeless or any(not self.fails(other.worker) for other in self._instances)

    def all_refuse(self) -> int:
        """Fewest different prompts that any instance refused for good in a row; 0 unless each one fails that way."""
        streaks = [self._streaks.get(instance.worker) for instance in self._instances]
        refusing = [s for s in streaks if s is not None and s.failing and s.hopeless]
        return min(len(s.prompts) for s in refusing) if refusing and len(refusing) == len(streaks) else 0

    def all_fail(self) -> Streak | None:
        """The shortest streak where every instance fails group after group; None unless each one does."""
        streaks = [self._streaks.get(instance.worker) for instance in self._instances]
        failing = [streak for streak in streaks if streak is not None and streak.failing]
        return max(failing, key=lambda s: s.first_ms) if failing and len(failing) == len(streaks) else None

    def newest(self) -> str:
        """Reason of a newest failure of any instance."""
        return next((streak.detail for streak in reversed(self._streaks.values())), "")

    def holds(self) -> Iterator[Hold]:
        """Every instance that is held back."""
        now_ms = self._interpreter.clock.now_ms()
        for instance in self._instances:
            if self.on_trial(instance.worker):
                streak = self._streaks[instance.worker]
                left_s = max(streak.until_ms - now_ms, 0) / 1000
                yield Hold(
                    worker=self._name_of(instance.worker), left_s=left_s, failed=streak.count, detail=streak.detail
                )

    def _hold(self, worker: WorkerId, streak: Streak, now_ms: int) -> None:
        if self.on_trial(worker) and now_ms >= streak.until_ms:
            streak.hold_ms = min(2 * streak.hold_ms, MAX_HOLD_MS) or FIRST_HOLD_MS
            streak.until_ms = now_ms + streak.hold_ms
            seconds, name = streak.hold_ms / 1000, self._name_of(worker)
            log.warning("%s held for %g s: its last %d groups failed: %s", name, seconds, streak.count, streak.detail)
        self.look()

    def look(self) -> None:
        """Let strategies look again at the instances whose hold has begun or is over."""
        failing = (worker for worker, streak in self._streaks.items() if streak.failing)
        seen = {worker: (self.on_trial(worker), self.on_hold(worker)) for worker in failing}
        for worker in dict.fromkeys((*seen, *self._seen)):
            if seen.get(worker) != self._seen.get(worker):
                self._instances.touch(worker)
        self._seen = seen
