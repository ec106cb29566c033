"""Failures by instance and by prompt: put failing instances on hold, and give failing prompts up.

An instance that fails every group immediately always has free slots, so a strategy would serve it first and it would
burn through the prompt source. A streak of failures puts it on hold, with exponential backoff, until it pushes a group.

A failure counts against its prompt only while the instance (or the stages) succeeds on other prompts: a broken instance
must not cost a prompt. The failures of each prompt are durable (``GroupTries``); the streaks of instances are not,
because a restarted scheduler soon observes them again.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from staleflow.protocols.consistency.effects import Occupied, Pushed, Released, ReleaseWhy
from staleflow.protocols.consistency.groups import GroupView, State
from staleflow.protocols.consistency.ids import WorkerId
from staleflow.protocols.wire.messages import RegisterRelease
from staleflow.protocols.wire.messages.status import Hold
from staleflow.servers.scheduler.coordination.instance import Instance
from staleflow.servers.scheduler.coordination.instances import Instances
from staleflow.servers.scheduler.ledger.interpreter import Interpreter

log = logging.getLogger(__name__)

HOLD_AFTER = 8
"""Distinct prompts that an instance fails in a row, without a push, before it counts as failing."""
LEASES_PER_FAILURE = 0.5
"""An instance counts as failing only if it works on at most this many leases for each failure. Failures are fast and
groups take minutes: before its first push, a healthy instance fails each bad prompt among its leases."""
FIRST_HOLD_MS, MAX_HOLD_MS = 1_000, 30_000
"""First and longest hold; each hold is twice as long as the one before."""
PROBE = 1
"""Concurrent groups of a failing instance between two holds."""
MAX_TRIES = 3
"""Failures after which a prompt is given up in the stages, or where no other instance can try it."""
MAX_PROMPTS = 1_000
"""Maximum number of distinct prompts counted in one streak: enough to exclude chance for a source of any size."""
MAX_STREAKS = 4_096
"""Maximum number of instances whose failures are stored."""
MAX_DETAIL = 500
"""Maximum characters of a reason."""


@dataclass(slots=True)
class Streak:
    """Consecutive failures without a success in between."""

    count: int = 0
    prompts: set[int] = field(default_factory=set[int])
    """Distinct failed rows of the prompt source, at most ``MAX_PROMPTS``."""
    hopeless: bool = True
    """The engine refused every one of them permanently."""
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

    def update(self, rows: int, working: int) -> None:
        """Update ``failing``. ``working``: groups that may still succeed. Only a success ends the failing state."""
        many = len(self.prompts) >= min(HOLD_AFTER, rows) or self.count >= HOLD_AFTER * MAX_TRIES
        self.failing = self.failing or (many and working <= LEASES_PER_FAILURE * self.count)


class Backoff:
    """Tracks failures and successes of groups, and decides which instances are on hold."""

    def __init__(self, interpreter: Interpreter, instances: Instances, name_of: Callable[[WorkerId], str]) -> None:
        self._interpreter = interpreter
        self._instances = instances
        self._name_of = name_of
        self._streaks: dict[WorkerId, Streak] = {}
        self._staged = Streak()
        self._tries = interpreter.prompts.tries
        self._shown: dict[WorkerId, tuple[bool, bool]] = {}
        """(on trial, on hold) of each failing instance, as of the last snapshot."""
        self.newest_given_up = ""
        """Failure reason of the prompt that was given up last."""
        interpreter.listen(Pushed, self._pushed)
        interpreter.listen(Occupied, self._occupied)

    # --- prompts ---------------------------------------------------------------------------------------------

    def exhausts(self, group_view: GroupView) -> bool:
        """Return whether one more failure of this group gives its prompt up.

        True after failures on two instances, or after ``MAX_TRIES`` on the only working one (twice as many if others
        work), while other prompts succeed there.
        """
        staged, totals = group_view.state is State.PUSHED, self._interpreter.totals.counts
        streak = self._staged if staged else self._streaks.get(group_view.worker)
        if (streak is not None and streak.failing) or not (totals.occupies if staged else totals.pushes):
            return False
        tries = self._tries[group_view.group]
        if staged:
            return tries.counted + 1 >= MAX_TRIES
        others = any(other.worker != group_view.worker and not self.fails(other.worker) for other in self._instances)
        limit = MAX_TRIES * (1 + others)
        name = self._name_of(group_view.worker)
        return any(instance != name for instance in tries.instances) or tries.counted + 1 >= limit

    def released(self, op: RegisterRelease, effect: Released, *, retired: bool) -> None:
        """Count a group that a worker or a shard released as aborted. ``retired``: its prompt was given up."""
        if op.why is not ReleaseWhy.ABORTED:
            self._tries.forget(effect.group)  # filtered: its id has retired
            return
        now_ms, rows = self._interpreter.clock.now_ms(), max(self._interpreter.prompts.rows, 1)
        streak = self._staged if effect.pushed else self._streak(effect.worker)
        if retired:
            self._tries.forget(effect.group)
            self.newest_given_up = op.detail[:MAX_DETAIL]
        else:
            instance = "" if effect.pushed else self._name_of(effect.worker)
            self._tries.add(effect.group, instance, counts=not streak.failing)
        streak.add(effect.group % rows, op.detail, now_ms, hopeless=op.hopeless)
        if effect.pushed:
            streak.update(rows, self._interpreter.machine.state_counts()["pushed"])
            return
        working = self._instances.get(effect.worker)
        streak.update(rows, 0 if working is None else len(working.leases))
        self._hold(effect.worker, streak, now_ms)

    def _streak(self, worker: WorkerId) -> Streak:
        streak = self._streaks.setdefault(worker, Streak())
        if len(self._streaks) > MAX_STREAKS:
            del self._streaks[next(iter(self._streaks))]
        return streak

    def _pushed(self, effect: Pushed) -> None:
        if self._streaks.pop(effect.worker, None) is not None:
            self.update()

    def _occupied(self, effect: Occupied) -> None:
        self._tries.forget(effect.group)
        if self._staged.count:
            self._staged = Streak()

    # --- instances -------------------------------------------------------------------------------------------

    def fails(self, worker: WorkerId) -> bool:
        """Return whether an instance fails group after group."""
        streak = self._streaks.get(worker)
        return streak is not None and streak.failing

    def on_hold(self, worker: WorkerId) -> bool:
        """Return whether an instance may start no groups for now."""
        return self.on_trial(worker) and self._interpreter.clock.now_ms() < self._streaks[worker].until_ms

    def may_start(self, instance: Instance) -> bool:
        """Return whether an instance may start groups: not leaving, not on hold, nor playing an evaluation of other
        weights."""
        return instance.stays and not self.on_hold(instance.worker) and instance.pinned in (None, instance.loaded())

    def capacity(self, instance: Instance) -> int:
        """Return the maximum number of groups of an instance: ``PROBE`` between two holds."""
        return PROBE if self.on_trial(instance.worker) else instance.capacity

    def on_trial(self, worker: WorkerId) -> bool:
        """Return whether an instance is restricted: on hold, or limited to ``PROBE`` concurrent groups.

        An instance that only refuses prompts is not restricted unless another instance succeeds: the prompts may be at
        fault, and refusing the bad ones leads to the good ones.
        """
        streak = self._streaks.get(worker)
        if streak is None or not streak.failing:
            return False
        return not streak.hopeless or any(not self.fails(other.worker) for other in self._instances)

    def all_refuse(self) -> int:
        """Return the minimum, over all instances, of distinct prompts permanently refused in a row; 0 if any works."""
        streaks = [self._streaks.get(instance.worker) for instance in self._instances]
        refusing = [s for s in streaks if s is not None and s.failing and s.hopeless]
        return min(len(s.prompts) for s in refusing) if refusing and len(refusing) == len(streaks) else 0

    def all_fail(self) -> Streak | None:
        """Return the youngest streak if every instance fails group after group, else None."""
        streaks = [self._streaks.get(instance.worker) for instance in self._instances]
        failing = [streak for streak in streaks if streak is not None and streak.failing]
        return max(failing, key=lambda s: s.first_ms) if failing and len(failing) == len(streaks) else None

    def newest(self) -> str:
        """Return the failure reason of the instance whose streak started last."""
        return next((streak.detail for streak in reversed(self._streaks.values())), "")

    def holds(self) -> dict[str, Hold]:
        """Return the restricted instances by name."""
        now_ms, holds = self._interpreter.clock.now_ms(), dict[str, Hold]()
        for instance in self._instances:
            if self.on_trial(instance.worker):
                streak = self._streaks[instance.worker]
                held_s = max(streak.until_ms - now_ms, 0) / 1000
                holds[self._name_of(instance.worker)] = Hold(groups=streak.count, held_s=held_s, detail=streak.detail)
        return holds

    def _hold(self, worker: WorkerId, streak: Streak, now_ms: int) -> None:
        if self.on_trial(worker) and now_ms >= streak.until_ms:
            streak.hold_ms = min(2 * streak.hold_ms, MAX_HOLD_MS) or FIRST_HOLD_MS
            streak.until_ms = now_ms + streak.hold_ms
            seconds, name = streak.hold_ms / 1000, self._name_of(worker)
            log.warning(
                "%s on hold for %g s: its last %d groups failed: %s", name, seconds, streak.count, streak.detail
            )
        self.update()

    def update(self) -> None:
        """Mark the instances whose hold has started or ended as changed."""
        failing = (worker for worker, streak in self._streaks.items() if streak.failing)
        shown = {worker: (self.on_trial(worker), self.on_hold(worker)) for worker in failing}
        for worker in dict.fromkeys((*shown, *self._shown)):
            if shown.get(worker) != self._shown.get(worker):
                self._instances.touch(worker)
        self._shown = shown
