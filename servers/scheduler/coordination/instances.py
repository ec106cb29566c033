"""Rollout instances: what each holds, what it was told, and the report that waits for the next command.

- Every report lists the leases that the instance works on. One that it lacks, though it acknowledged the command, is
  assigned again; one that it should not have is aborted. So a lost command, a lost reply and a restart all heal.
- An interrupt is ordered again whenever the instance may not have heard it: when it comes back, and with a lease that
  is assigned again.
- A lease at weights that the instance neither has nor was told to load comes after the order to load them: the overdue
  policy ``retry`` leases at the newest version whatever the instance has.
- Nothing is answered before ``answer`` is called, which is after the commit.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping

from staleflow.net.endpoint import Call
from staleflow.process.clock import Clock
from staleflow.protocols.consistency.effects import Pushed, Released, Reserved, RolledBack, Truncate
from staleflow.protocols.consistency.groups import GroupView
from staleflow.protocols.consistency.ids import GroupId, LeaseId, Lineage, Version, WorkerId
from staleflow.protocols.coordination.view import Move
from staleflow.protocols.wire.messages import Abort, Assign, Command, Commands, Interrupt, Report, Yield
from staleflow.protocols.wire.trajectory import shard_of
from staleflow.servers.scheduler.coordination.instance import Instance
from staleflow.servers.scheduler.coordination.moves import Moves

LeasesOf = Callable[[WorkerId], Mapping[LeaseId, GroupView]]

MAX_ABORTS = 4_096
"""Leases that one instance is told to abort at once; what else it should not have it is told after it has listened."""


class Instances:
    """All rollout instances that are alive, and what the ledger's effects mean to them."""

    def __init__(self, shards: int, leases_of: LeasesOf, clock: Clock) -> None:
        self._shards = shards
        self._clock = clock
        self._leases_of = leases_of
        self._by_worker: dict[WorkerId, Instance] = {}
        self._to_answer: dict[WorkerId, Instance] = {}
        self._touched: dict[WorkerId, None] = {}
        self._cut: dict[LeaseId, None] = {}
        """Leases that are to end with the tokens so far."""
        self.moves = Moves()
        """Groups on their way between two of them."""
        self.newest = Version(-1)
        """Newest published version; the owner keeps it."""
        self.draining = False
        self.changed = True
        """Something that a strategy looks at may be different from what it saw last."""

    def __iter__(self) -> Iterator[Instance]:
        return iter(self._by_worker.values())

    def get(self, worker: WorkerId) -> Instance | None:
        return self._by_worker.get(worker)

    # --- coming and going ------------------------------------------------------------------------------------

    def add(self, worker: WorkerId, capacity: int) -> None:
        """An instance is alive (again)."""
        if worker not in self._by_worker:
            instance = self._by_worker[worker] = Instance(worker, capacity)
            instance.reload(self._leases_of(worker))
            for lease in instance.leases:
                self._cut_again(instance, lease)
        self.touch(worker)

    def touch(self, worker: WorkerId) -> None:
        """Let strategies look at an instance again."""
        self._touched[worker] = None
        self.changed = True

    def take_touched(self) -> list[WorkerId]:
        """Instances that came, changed or left since the last call."""
        touched = list(self._touched)
        self._touched.clear()
        return touched

    def touch_pulling(self) -> None:
        """Time has passed for those that were told to load weights."""
        for instance in self:
            if instance.pull_ms:
                self._touched[instance.worker] = None
        self.changed = True

    def remove(self, worker: WorkerId) -> None:
        """An instance is gone; its leases are the ledger's business."""
        self._by_worker.pop(worker, None)
        self._to_answer.pop(worker, None)
        self.touch(worker)
        self._touch_ends(self.moves.lose(worker))

    def reload(self) -> None:
        """The ledger went back to its last commit: what was not sent was never ordered, and it says anew who to cut."""
        self.moves.clear()
        self._cut.clear()
        for instance in self:
            instance.reload(self._leases_of(instance.worker))
            self.touch(instance.worker)

    # --- what the ledger did ---------------------------------------------------------------------------------

    def on_reserved(self, effect: Reserved) -> None:
        self.moves.arrives(effect.group)
        instance = self._by_worker.get(effect.worker)
        if instance is not None:
            self._assign(instance, effect.group, effect.lease, effect.lineage, effect.version)

    def on_pushed(self, effect: Pushed) -> None:
        self._over(effect.group, effect.lease)
        instance = self._by_worker.get(effect.worker)
        if instance is not None and instance.leases.pop(effect.lease, None) is not None:
            instance.pushed[effect.lease] = None
            self.touch(instance.worker)

    def on_released(self, effect: Released) -> None:
        self._over(effect.group, effect.lease)
        instance = self._by_worker.get(effect.worker)
        if instance is None or effect.pushed or instance.leases.pop(effect.lease, None) is None:
            return
        if self.moves.is_leaving(effect.lease):
            self.touch(instance.worker)  # it stopped by itself, and is told so by the answer
        else:
            instance.aborting[effect.lease] = self._order(instance, Abort(lease=effect.lease))

    def on_truncate(self, effect: Truncate) -> None:
        self._cut[effect.lease] = None
        instance = self._by_worker.get(effect.worker)
        if instance is not None:
            self._cut_again(instance, effect.lease)

    def on_rolled_back(self, _: RolledBack) -> None:
        self._touch_ends([moving.order for moving in self.moves.pending.values()])
        self.moves.clear()

    def _over(self, group: GroupId, lease: LeaseId) -> None:
        """Nobody works under this lease any more."""
        self._cut.pop(lease, None)
        self.moves.forget(group)
        self.end_move(lease)

    def _cut_again(self, instance: Instance, lease: LeaseId) -> None:
        if lease in self._cut:
            self._order(instance, Interrupt(lease=lease))

    # --- what the instance says ------------------------------------------------------------------------------

    def report(self, instance: Instance, call: Call, report: Report, now_ms: int) -> None:
        """Take in a report; its call waits for commands until ``answer`` or ``answer_due``."""
        older, instance.call = instance.call, call
        if older is not None and not older.done:
            older.reply(Commands(first=report.ack + 1, commands=[], version=self.newest, drain=self.draining))
        instance.due_ms = now_ms + min(report.wait_ms, 60_000)
        instance.commands.acknowledge(report.ack)
        if report.stats != instance.stats:
            instance.hear(report.stats)
            self.touch(instance.worker)
        if report.held or instance.leases or instance.aborting or instance.pushed:
            self._compare(instance, report)
        self._to_answer[instance.worker] = instance

    def _compare(self, instance: Instance, report: Report) -> None:
        """Heal the difference between the leases that the instance has and those that it should have."""
        held = dict.fromkeys(report.held)
        acked = instance.commands.acked
        for lease in held:
            if len(instance.aborting) >= MAX_ABORTS:
                break
            if lease not in instance.leases and lease not in instance.pushed and not instance.aborts(lease):
                instance.aborting[lease] = self._order(instance, Abort(lease=lease))
        missing = [lease for lease, (_, number) in instance.leases.items() if number <= acked and lease not in held]
        if missing:
            known = self._leases_of(instance.worker)
            for lease in missing:
                view = known[lease]
                self._assign(instance, view.group, lease, view.lineage, view.version)
                self._cut_again(instance, lease)
        instance.pushed = {lease: None for lease in instance.pushed if lease in held}
        instance.aborting = {x: number for x, number in instance.aborting.items() if x in held or number > acked}

    # --- moves -----------------------------------------------------------------------------------------------

    def order_move(self, order: Move, now_ms: int) -> None:
        """Tell an instance to give a group up, for another one; nothing if either is gone or the group is not there."""
        instance = self._by_worker.get(order.worker)
        known = instance is not None and order.lease in instance.leases and order.to in self._by_worker
        if instance is None or not known or order.lease in self.moves.pending:
            return
        self.moves.order(order, now_ms)
        self._order(instance, Yield(lease=order.lease))
        self.touch(order.to)

    def end_move(self, lease: LeaseId) -> None:
        """The group is over, or stays where it is."""
        if (order := self.moves.end(lease)) is not None:
            self._touch_ends([order])

    def expire_moves(self, now_ms: int) -> None:
        """Give up the moves that take too long."""
        self._touch_ends(self.moves.expire(now_ms))

    def _touch_ends(self, orders: Iterable[Move]) -> None:
        """Strategies see other ends of these moves than before."""
        for order in orders:
            for worker in (order.worker, order.to):
                self.touch(worker)

    # --- answers ---------------------------------------------------------------------------------------------

    def answer(self) -> None:
        """Send what was ordered to every instance that waits."""
        for instance in self._to_answer.values():
            to_tell = instance.commands.pending or (self.draining and not instance.knows_end)
            if to_tell and instance.call is not None:
                self._reply(instance)
        self._to_answer.clear()

    def answer_due(self, now_ms: int) -> None:
        """Answer the reports that have waited long enough."""
        for instance in self:
            if instance.call is not None and instance.due_ms <= now_ms:
                self._reply(instance)

    def drain(self) -> None:
        """No more work: every instance is told once, those that wait with the next ``answer``."""
        self.draining = True
        self._to_answer = dict(self._by_worker)

    def _reply(self, instance: Instance) -> None:
        call, instance.call = instance.call, None
        if call is not None and not call.done:
            commands, instance.knows_end = instance.commands, self.draining
            call.reply(
                Commands(first=commands.acked + 1, commands=commands.take(), version=self.newest, drain=self.draining)
            )

    def order_pull(self, instance: Instance, lineage: Lineage, version: Version, now_ms: int) -> None:
        """Tell an instance to load weights."""
        instance.order_pull(lineage, version, now_ms)
        self.touch(instance.worker)
        self._to_answer[instance.worker] = instance

    def _order(self, instance: Instance, command: Command) -> int:
        self.touch(instance.worker)
        self._to_answer[instance.worker] = instance
        return instance.commands.add(command)

    def _assign(self, instance: Instance, group: GroupId, lease: LeaseId, lineage: Lineage, version: Version) -> None:
        if not instance.will_have(lineage, version):
            self.order_pull(instance, lineage, version, self._clock.now_ms())
        shard = shard_of(group, self._shards) if self._shards > 1 else 0
        command = Assign(
            group=group,
            lease=lease,
            lineage=lineage,
            version=version,
            shard=shard,
            partial=self.moves.partial(group),
            partial_sha=self.moves.partial_sha(group),
        )
        instance.leases[lease] = (group, self._order(instance, command))
