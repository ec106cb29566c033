"""What steps are like: how much is under way, how long the trainer waits and why. ``just_in_time`` goes by it."""

from collections.abc import Callable

from staleflow.protocols.consistency.effects import Delivered
from staleflow.protocols.consistency.limits import Limits
from staleflow.protocols.consistency.machine import Machine
from staleflow.protocols.coordination.admission import Pace, Step, paced


class Pacing:
    """Looked at once a cycle; what lay between two looks was as the earlier one found it. In memory only."""

    def __init__(self, limits: Limits, asked: Callable[[], bool]) -> None:
        """``asked``: the trainer waits for a batch that is not sealed."""
        self._most = limits.max_staleness + 1.0
        self._batch_size = limits.batch_size
        self.pace = Pace(lead=self._most)
        self.waits = False
        """The trainer waits for a batch."""
        self._asked = asked
        self._starved = False
        self._delivered = -1
        self._looked_ms = -1
        self._began_ms = 0
        self._pinned_ms = 0
        self._starved_ms = 0
        self._under_way = 0
        self._under_way_ms = 0
        """Groups x milliseconds."""
        self._version = -1

    def on_delivered(self, effect: Delivered) -> None:
        self._delivered = effect.step

    def trains(self, version: int) -> bool:
        """The trainer has a batch of which no version has come yet."""
        return self._delivered >= version >= 0 and not self.waits

    def look(self, machine: Machine, now_ms: int) -> None:
        """Count what has passed; after a new version, what the last step was like decides the pace."""
        passed_ms = now_ms - self._looked_ms
        self._under_way_ms += self._under_way * passed_ms
        if self.waits and self._starved:
            self._starved_ms += passed_ms
        elif self.waits:
            self._pinned_ms += passed_ms
        if machine.version != self._version:
            self._next(machine.version, now_ms)
        counts = machine.state_counts()
        self._under_way = counts["leased"] + counts["pushed"]
        self._looked_ms = now_ms
        self.waits = machine.version >= 0 and self._asked()
        self._starved = self.waits and machine.starved()

    def _next(self, version: int, now_ms: int) -> None:
        """Another version. The first step is how a run begins, and a rollback is no step: neither counts."""
        passed_ms = now_ms - self._began_ms
        if version == self._version + 1 and version > 1 and passed_ms > 0:
            step = Step(
                seconds=passed_ms / 1000,
                pinned_s=self._pinned_ms / 1000,
                starved_s=self._starved_ms / 1000,
                under_way=self._under_way_ms / passed_ms / self._batch_size,
            )
            self.pace = paced(self.pace, step, self._most)
        elif version < self._version:
            self._delivered = -1
        self._version = version
        self._began_ms = now_ms
        self._pinned_ms = self._starved_ms = self._under_way_ms = 0
