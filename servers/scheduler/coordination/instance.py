"""State of one rollout instance and its command queue.

Commands are numbered and kept until a report acknowledges them. A number that was sent is never reused for another
command.
"""

from collections.abc import Mapping

from staleflow.net.endpoint import Call
from staleflow.protocols.consistency.groups import GroupView
from staleflow.protocols.consistency.ids import GroupId, LeaseId, Lineage, Version, WorkerId
from staleflow.protocols.wire.messages import Command, Evaluate, InstanceStats, Pull

PULL_TIMEOUT_MS = 10_000
"""Timeout of a pull: then it is ordered again, and the instance may start groups with its loaded weights."""
PULL_RETRY_MS = 1_000
"""Delay before a failed pull is ordered again."""


class CommandQueue:
    """Commands that are not acknowledged, with consecutive numbers from ``acked + 1``."""

    __slots__ = ("acked", "last", "pending", "sent")

    def __init__(self) -> None:
        self.acked = 0
        self.sent = 0
        self.pending: list[Command] = []
        self.last: Command | None = None
        """The newest command, for status."""

    def add(self, command: Command) -> int:
        """Queue a command and return its number."""
        self.last = command
        self.pending.append(command)
        return self.acked + len(self.pending)

    def acknowledge(self, number: int) -> None:
        """Remove the commands up to ``number``. A number that was never sent belongs to an earlier incarnation."""
        if number <= self.acked:
            return
        del self.pending[: number - self.acked if number <= self.sent else 0]
        self.acked = number
        self.sent = max(self.sent, number)

    def discard_unsent(self) -> list[Command]:
        """Remove and return the commands that were never sent."""
        kept = max(self.sent - self.acked, 0)
        never, self.pending = self.pending[kept:], self.pending[:kept]
        return never

    def take(self) -> list[Command]:
        """Return all pending commands and mark them as sent."""
        self.sent = self.acked + len(self.pending)
        return list(self.pending)


class Instance:
    """One rollout worker."""

    __slots__ = (
        "aborting",
        "call",
        "capacity",
        "commands",
        "drain_sent",
        "due_ms",
        "evaluation",
        "leases",
        "leaving",
        "pinned",
        "pull",
        "pull_ms",
        "pushed",
        "released",
        "reported",
        "stats",
        "stuck",
        "worker",
    )

    def __init__(self, worker: WorkerId, capacity: int) -> None:
        self.worker = worker
        self.capacity = capacity
        self.stats = InstanceStats()
        self.commands = CommandQueue()
        self.leases: dict[LeaseId, tuple[GroupId, int]] = {}
        """Leases with their group and the number of the assigning command (0: by an earlier incarnation)."""
        self.pushed: dict[LeaseId, None] = {}
        """Pushed leases that the worker may still report."""
        self.aborting: dict[LeaseId, int] = {}
        """Leases with an abort command, and the number of that command."""
        self.pull: tuple[Lineage, Version] | None = None
        """Weights of the pull command that is not completed."""
        self.pull_ms = 0
        """Time of the pull command; after a failed pull, the time from which it may be repeated."""
        self.reported = (Lineage(0), Version(-1))
        """Newest weights that it reported as loaded and that the trace contains."""
        self.stuck = False
        """The last pull command failed or timed out."""
        self.call: Call | None = None
        """The open report."""
        self.due_ms = 0
        self.pinned: tuple[Lineage, Version] | None = None
        """Weights of the evaluation that it plays, or will play; it gets no order to load other ones."""
        self.evaluation = 0
        """Ticket of the evaluation that it was ordered to play; 0: none."""
        self.leaving = False
        """It leaves soon and hands its groups over."""
        self.released = False
        """It gets no further group, and leaves once it has none."""
        self.drain_sent = False
        """The drain notice was sent."""

    def loaded(self) -> tuple[Lineage, Version]:
        """Return the weights of its last report."""
        return self.stats.lineage, self.stats.version

    def will_have(self, lineage: Lineage, version: Version) -> bool:
        """Return whether these weights or newer ones are loaded or ordered by the newest pull."""
        return (lineage, version) <= (self.loaded() if self.pull is None else self.pull)

    def update_stats(self, stats: InstanceStats) -> None:
        """Store the engine statistics of a report, and complete the pull that they confirm."""
        self.stats = stats
        if self.pull == self.loaded():
            self.pull = None
            self.pull_ms = 0
            self.stuck = False

    def reload(self, leases: Mapping[LeaseId, GroupView]) -> None:
        """Replace the leases and remove unsent commands. Leases without a sent command count as assigned by an earlier
        incarnation."""
        unsent = self.commands.discard_unsent()
        if any(isinstance(command, Pull) for command in unsent):
            self.pull, self.pull_ms = None, 0
        if any(isinstance(command, Evaluate) for command in unsent):
            self.pinned, self.evaluation = None, 0
        sent = self.commands.sent
        numbers = {lease: number for lease, (_, number) in self.leases.items() if number <= sent}
        self.leases = {lease: (view.group, numbers.get(lease, 0)) for lease, view in leases.items()}

    def aborts(self, lease: LeaseId) -> bool:
        """Return whether an abort of the lease is pending, not acknowledged."""
        return self.aborting.get(lease, 0) > self.commands.acked

    @property
    def stays(self) -> bool:
        """False if it leaves soon, by its own will or because it is released: it gets nothing new to do."""
        return not (self.leaving or self.released)

    @property
    def may_leave(self) -> bool:
        """True if it is released and has nothing left to do."""
        return self.released and not self.leases and self.pinned is None

    def has_received_evaluation(self) -> bool:
        """Return whether it has acknowledged the newest order to play an evaluation."""
        return not any(isinstance(command, Evaluate) for command in self.commands.pending)

    def order_pull(self, lineage: Lineage, version: Version, now_ms: int) -> None:
        self.stuck = self.stuck or self.pull is not None
        self.commands.add(Pull(lineage=lineage, version=version))
        self.pull = (lineage, version)
        self.pull_ms = now_ms

    def pull_failed(self, now_ms: int) -> None:
        """Note a failed pull; it may be repeated after ``PULL_RETRY_MS``."""
        self.pull = None
        self.pull_ms = now_ms + PULL_RETRY_MS
        self.stuck = True

    def pulling(self, now_ms: int) -> bool:
        """Return whether a pull is in progress, or the delay after a failed one is not over."""
        if self.pull is None:
            return now_ms < self.pull_ms
        return now_ms < self.pull_ms + PULL_TIMEOUT_MS
