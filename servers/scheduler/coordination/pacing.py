"""Pace of the train steps for ``just_in_time``: groups in flight, and how long and why the trainer waits."""

from collections.abc import Callable

from staleflow.protocols.consistency.effects import Delivered
from staleflow.protocols.consistency.ids import Step as TrainStep
from staleflow.protocols.consistency.limits import Limits
from staleflow.protocols.consistency.machine import Machine
from staleflow.protocols.coordination.admission import FIRST_MARGIN, Pace, Step, first_paced, paced


class Pacing:
    """Sampled once a cycle: each sample stands for the time until the next one. Kept in memory only."""

    def __init__(
        self,
        limits: Limits,
        waiting_step: Callable[[], TrainStep | None],
        measured: Callable[[Step, int, int], None] = lambda step, version, now_ms: None,
    ) -> None:
        """``waiting_step``: returns the step whose batch the trainer waits for; None if it does not wait.
        ``measured``: called with each step, its version and the time in milliseconds."""
        self._measured = measured
        self._most = limits.max_staleness + 1.0
        self._batch_size = limits.batch_size
        self.pace = Pace(lead=self._most, margin=FIRST_MARGIN)
        self.waits = False
        """The trainer waits for a batch."""
        self._publishes = False
        """The trainer waits for a batch while the version of the step before it is not published yet."""
        self._waiting_step = waiting_step
        self._starved = False
        self._blocked = False
        self._delivered = -1
        self._looked_ms = -1
        self._has_leased = False
        """Groups have been leased since this process started."""
        self._began_ms = 0
        self._pinned_ms = 0
        self._starved_ms = 0
        self._blocked_ms = 0
        self._under_way = 0
        self._under_way_ms = 0
        """Groups x milliseconds."""
        self._version = -1

    def on_delivered(self, effect: Delivered) -> None:
        self._delivered = effect.step

    def trains(self, version: int) -> bool:
        """Return whether the trainer has a batch whose version is not published yet."""
        return self._delivered >= version >= 0 and (not self.waits or self._publishes)

    def update(self, machine: Machine, now_ms: int) -> None:
        """Add the time since the last sample. After a new version, compute the pace from the completed step."""
        passed_ms = now_ms - self._looked_ms
        self._under_way_ms += self._under_way * passed_ms
        if self.waits and self._starved:
            self._starved_ms += passed_ms
            self._blocked_ms += passed_ms if self._blocked else 0
        elif self.waits:
            self._pinned_ms += passed_ms
        if machine.version != self._version:
            self._next(machine.version, now_ms)
        counts = machine.state_counts()
        self._under_way = counts["leased"] + counts["pushed"]
        if not self._has_leased:  # engines may still load the first version
            self._has_leased = machine.version > 0 or self._under_way > 0
            self._pinned_ms = self._starved_ms = self._blocked_ms = 0
        self._looked_ms = now_ms
        step = self._waiting_step() if machine.version >= 0 else None
        self.waits, self._publishes = step is not None, step is not None and step > machine.version
        self._starved = self.waits and machine.starved()
        missing = self._batch_size - counts["occupied"]
        self._blocked = self._starved and (counts["pushed"] >= missing or not counts["leased"])

    def _next(self, version: int, now_ms: int) -> None:
        """Finish a step at a new version.

        Rollbacks show no pace, and the first step of a run only the cost of gathering.
        """
        passed_ms = now_ms - self._began_ms
        if version == self._version + 1 and version > 1 and passed_ms > 0:
            step = Step(
                seconds=passed_ms / 1000,
                pinned_s=self._pinned_ms / 1000,
                starved_s=self._starved_ms / 1000,
                blocked_s=self._blocked_ms / 1000,
                under_way=self._under_way_ms / passed_ms / self._batch_size,
            )
            self.pace = paced(self.pace, step, self._most)
            self._measured(step, version, now_ms)
        elif version == 1 and self._version == 0:
            self.pace = first_paced(self.pace, self._starved_ms / 1000, self._most)
        elif version < self._version:
            self._delivered = -1
        self._version = version
        self._began_ms = now_ms
        self._pinned_ms = self._starved_ms = self._blocked_ms = self._under_way_ms = 0
