"""One rollout instance, and the commands it was told.

Commands are numbered and kept until a report acknowledges them; a number that was sent never changes its meaning.
"""

from collections.abc import Mapping

from staleflow.net.endpoint import Call
from staleflow.protocols.consistency.groups import GroupView
from staleflow.protocols.consistency.ids import GroupId, LeaseId, Lineage, Version, WorkerId
from staleflow.protocols.wire.messages import Command, InstanceStats, Pull

PULL_PATIENCE_MS = 10_000
"""After this an order to load weights is given again, and the instance may start groups with those it has."""
PULL_RETRY_MS = 1_000
"""A pull that failed is ordered again after this."""


class CommandQueue:
    """Commands ``first, first + 1, ...`` that are not acknowledged."""

    __slots__ = ("acked", "last", "pending", "sent")

    def __init__(self) -> None:
        self.acked = 0
        self.sent = 0
        self.pending: list[Command] = []
        self.last: Command | None = None
        """Given last, for those who look on."""

    def add(self, command: Command) -> int:
        """Queue a command; its number."""
        self.last = command
        self.pending.append(command)
        return self.acked + len(self.pending)

    def acknowledge(self, number: int) -> None:
        """Everything up to ``number`` was taken over; one that was never given comes from an earlier incarnation."""
        if number <= self.acked:
            return
        del self.pending[: number - self.acked if number <= self.sent else 0]
        self.acked = number
        self.sent = max(self.sent, number)

    def unsend(self) -> list[Command]:
        """Forget what was never sent; returns it."""
        kept = max(self.sent - self.acked, 0)
        never, self.pending = self.pending[kept:], self.pending[:kept]
        return never

    def take(self) -> list[Command]:
        """All of it, to be sent now."""
        self.sent = self.acked + len(self.pending)
        return list(self.pending)


class Instance:
    """One rollout worker."""

    __slots__ = (
        "aborting",
        "call",
        "capacity",
        "commands",
        "due_ms",
        "knows_end",
        "leases",
        "pull",
        "pull_ms",
        "pushed",
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
        """Its leases: the group, and the number of the command that assigned it (0: by an earlier incarnation)."""
        self.pushed: dict[LeaseId, None] = {}
        """Leases that ended well and that the worker may still report."""
        self.aborting: dict[LeaseId, int] = {}
        """Leases that it was told to abort, and the number of that command."""
        self.pull: tuple[Lineage, Version] | None = None
        """Weights that it was told to load and has not reported."""
        self.pull_ms = 0
        """When it was told, or may be told again after a failure."""
        self.reported = (Lineage(0), Version(-1))
        """Newest weights that it reported as loaded, and that the trace has."""
        self.stuck = False
        """The last order to load weights was not carried out."""
        self.call: Call | None = None
        """Its open report."""
        self.due_ms = 0
        self.knows_end = False
        """It was told that there is no more work."""

    def loaded(self) -> tuple[Lineage, Version]:
        """The weights that it reported last."""
        return self.stats.lineage, self.stats.version

    def will_have(self, lineage: Lineage, version: Version) -> bool:
        """Whether these weights or newer ones are loaded, or on their way by the newest order."""
        return (lineage, version) <= (self.loaded() if self.pull is None else self.pull)

    def hear(self, stats: InstanceStats) -> None:
        """What its engine says."""
        self.stats = stats
        if self.pull == self.loaded():
            self.pull = None
            self.pull_ms = 0
            self.stuck = False

    def reload(self, leases: Mapping[LeaseId, GroupView]) -> None:
        """Its leases are these now, and what was not sent was never ordered; leases that no sent command assigned were
        assigned by an earlier incarnation."""
        if any(isinstance(command, Pull) for command in self.commands.unsend()):
            self.pull, self.pull_ms = None, 0
        sent = self.commands.sent
        known = {lease: number for lease, (_, number) in self.leases.items() if number <= sent}
        self.leases = {lease: (held.group, known.get(lease, 0)) for lease, held in leases.items()}

    def aborts(self, lease: LeaseId) -> bool:
        """Whether it was told to abort a lease, and has not acknowledged that."""
        return self.aborting.get(lease, 0) > self.commands.acked

    def order_pull(self, lineage: Lineage, version: Version, now_ms: int) -> None:
        self.stuck = self.stuck or self.pull is not None
        self.commands.add(Pull(lineage=lineage, version=version))
        self.pull = (lineage, version)
        self.pull_ms = now_ms

    def pull_failed(self, now_ms: int) -> None:
        """It said so; the order may be given again a little later."""
        self.pull = None
        self.pull_ms = now_ms + PULL_RETRY_MS
        self.stuck = True

    def pulling(self, now_ms: int) -> bool:
        """Loading, or not to be told to load yet."""
        if self.pull is None:
            return now_ms < self.pull_ms
        return now_ms < self.pull_ms + PULL_PATIENCE_MS
