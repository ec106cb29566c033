"""Rollout instances: the leases and commands of each one, and its open report, which waits for the next command.

- Every report lists the leases that the instance works on. A missing lease whose command was acknowledged is assigned
  again; an unexpected lease is aborted. This repairs lost commands, lost replies and restarts.
- An interrupt is repeated whenever the instance may not have received it: after the instance returns, and with a lease
  that is assigned again.
- A lease at a version that the instance has neither loaded nor been ordered to load is preceded by a pull command: the
  overdue policy ``retry`` leases at the newest version, regardless of the instance's version.
- Replies are sent only by ``answer``, which runs after the commit.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping

from staleflow.net.endpoint import Call
from staleflow.process.clock import Clock
from staleflow.protocols.consistency.effects import Pushed, Released, Reserved, RolledBack, Truncate
from staleflow.protocols.consistency.groups import GroupView
from staleflow.protocols.consistency.ids import GroupId, LeaseId, Lineage, Version, WorkerId
from staleflow.protocols.coordination.view import Move
from staleflow.protocols.wire.messages import (
    Abort,
    Assign,
    Command,
    Commands,
    EndEvaluation,
    Evaluate,
    Interrupt,
    Report,
    Yield,
)
from staleflow.protocols.wire.trajectory import shard_of
from staleflow.servers.scheduler.coordination.instance import Instance
from staleflow.servers.scheduler.coordination.moves import Moves

LeasesOf = Callable[[WorkerId], Mapping[LeaseId, GroupView]]

MAX_ABORTS = 4_096
"""Maximum number of unacknowledged aborts for one instance; further aborts wait for its next report."""


class Instances:
    """All live rollout instances; turns effects of the ledger into commands."""

    def __init__(self, shards: int, leases_of: LeasesOf, clock: Clock) -> None:
        self._shards = shards
        self._clock = clock
        self._leases_of = leases_of
        self._by_worker: dict[WorkerId, Instance] = {}
        self._to_answer: dict[WorkerId, Instance] = {}
        self._touched: dict[WorkerId, None] = {}
        self._truncated: dict[LeaseId, None] = {}
        """Leases to truncate: they end with the tokens generated so far."""
        self.moves = Moves()
        """Groups that are moving between two instances."""
        self.newest = Version(-1)
        """Newest published version; updated by the owner."""
        self.draining = False
        self.changed = True
        """An input of the strategies may have changed since the last cycle."""

    def __iter__(self) -> Iterator[Instance]:
        return iter(self._by_worker.values())

    def get(self, worker: WorkerId) -> Instance | None:
        return self._by_worker.get(worker)

    # --- membership ------------------------------------------------------------------------------------------

    def add(self, worker: WorkerId, capacity: int) -> None:
        """Add an instance that has attached or returned."""
        if worker not in self._by_worker:
            instance = self._by_worker[worker] = Instance(worker, capacity)
            instance.reload(self._leases_of(worker))
            for lease in instance.leases:
                self._interrupt_truncated(instance, lease)
        self.touch(worker)

    def touch(self, worker: WorkerId) -> None:
        """Mark an instance as changed, so that the next snapshot updates it."""
        self._touched[worker] = None
        self.changed = True

    def take_touched(self) -> list[WorkerId]:
        """Return the instances that were added, changed or removed since the last call."""
        touched = list(self._touched)
        self._touched.clear()
        return touched

    def touch_pulling(self) -> None:
        """Mark instances with a pull command as changed: its timeout may have passed."""
        for instance in self:
            if instance.pull_ms:
                self._touched[instance.worker] = None
        self.changed = True

    def remove(self, worker: WorkerId) -> None:
        """Remove an instance. Its leases stay in the ledger until they expire or are released.

        Its open report is answered, as a worker that still lives learns only from its next one that it was replaced.
        """
        instance = self._by_worker.pop(worker, None)
        if instance is not None and instance.call is not None and not instance.call.done:
            first = instance.commands.acked + 1
            instance.call.reply(Commands(first=first, commands=[], version=self.newest, drain=self.draining))
        self._to_answer.pop(worker, None)
        self.touch(worker)
        self._touch_ends(self.moves.remove_instance(worker))

    def reload(self) -> None:
        """Undo unsent commands after a failed commit. The ledger emits its truncations again."""
        self.moves.clear()
        self._truncated.clear()
        for instance in self:
            instance.reload(self._leases_of(instance.worker))
            self.touch(instance.worker)

    # --- effects of the ledger -------------------------------------------------------------------------------

    def on_reserved(self, effect: Reserved) -> None:
        self.moves.lease_granted(effect.group)
        instance = self._by_worker.get(effect.worker)
        if instance is not None:
            self._assign(instance, effect.group, effect.lease, effect.lineage, effect.version)

    def on_pushed(self, effect: Pushed) -> None:
        self._forget_lease(effect.group, effect.lease)
        instance = self._by_worker.get(effect.worker)
        if instance is not None and instance.leases.pop(effect.lease, None) is not None:
            instance.pushed[effect.lease] = None
            self.touch(instance.worker)

    def on_released(self, effect: Released) -> None:
        self._forget_lease(effect.group, effect.lease)
        instance = self._by_worker.get(effect.worker)
        if instance is None or effect.pushed or instance.leases.pop(effect.lease, None) is None:
            return
        if self.moves.is_leaving(effect.lease):
            self.touch(instance.worker)  # the instance gave the group up itself, so it needs no abort
        else:
            instance.aborting[effect.lease] = self._order(instance, Abort(lease=effect.lease))

    def on_truncate(self, effect: Truncate) -> None:
        self._truncated[effect.lease] = None
        instance = self._by_worker.get(effect.worker)
        if instance is not None:
            self._interrupt_truncated(instance, effect.lease)

    def on_rolled_back(self, _: RolledBack) -> None:
        self._touch_ends([moving.order for moving in self.moves.pending.values()])
        self.moves.clear()

    def _forget_lease(self, group: GroupId, lease: LeaseId) -> None:
        """Discard the state of a lease that has ended."""
        self._truncated.pop(lease, None)
        self.moves.forget(group)
        self.end_move(lease)

    def _interrupt_truncated(self, instance: Instance, lease: LeaseId) -> None:
        if lease in self._truncated:
            self._order(instance, Interrupt(lease=lease))

    # --- reports ---------------------------------------------------------------------------------------------

    def report(self, instance: Instance, call: Call, report: Report, now_ms: int) -> None:
        """Process a report and keep its call until ``answer`` or ``answer_due`` replies with commands."""
        older, instance.call = instance.call, call
        if older is not None and not older.done:  # superseded: the newer report gets the commands
            older.reply(Commands(first=report.ack + 1, commands=[], version=self.newest, drain=self.draining))
        instance.due_ms = now_ms + min(report.wait_ms, 60_000)
        instance.commands.acknowledge(report.ack)
        if report.stats != instance.stats:
            instance.update_stats(report.stats)
            self.touch(instance.worker)
        if report.leaving != instance.leaving:
            instance.leaving = report.leaving
            self.touch(instance.worker)
        if report.held or instance.leases or instance.aborting or instance.pushed:
            self._compare(instance, report)
        self._to_answer[instance.worker] = instance

    def _compare(self, instance: Instance, report: Report) -> None:
        """Reconcile the leases that the instance reports with those that it should have."""
        reported = dict.fromkeys(report.held)
        acked = instance.commands.acked
        for lease in reported:
            if len(instance.aborting) >= MAX_ABORTS:
                break
            if lease not in instance.leases and lease not in instance.pushed and not instance.aborts(lease):
                instance.aborting[lease] = self._order(instance, Abort(lease=lease))
        missing = [lease for lease, (_, number) in instance.leases.items() if number <= acked and lease not in reported]
        if missing:
            leases = self._leases_of(instance.worker)
            for lease in missing:
                view = leases[lease]
                self._assign(instance, view.group, lease, view.lineage, view.version)
                self._interrupt_truncated(instance, lease)
        instance.pushed = {lease: None for lease in instance.pushed if lease in reported}
        instance.aborting = {x: number for x, number in instance.aborting.items() if x in reported or number > acked}

    # --- moves -----------------------------------------------------------------------------------------------

    def order_move(self, order: Move, now_ms: int) -> None:
        """Order an instance to yield a group to another one; no-op if either is gone or the lease is not held."""
        instance = self._by_worker.get(order.worker)
        movable = instance is not None and order.lease in instance.leases and order.to in self._by_worker
        if instance is None or not movable or order.lease in self.moves.pending:
            return
        self.moves.order(order, now_ms)
        self._order(instance, Yield(lease=order.lease))
        self.touch(order.to)

    def reserve_move(self, order: Move, now_ms: int) -> None:
        """Keep a place free at the target of a move that its source has requested."""
        self.moves.order(order, now_ms, reserved=True)
        self.touch(order.to)

    def end_move(self, lease: LeaseId) -> None:
        """Discard the move of a lease, if there is one."""
        if (order := self.moves.end(lease)) is not None:
            self._touch_ends([order])

    def expire_moves(self, now_ms: int) -> None:
        """Discard the moves that have timed out."""
        self._touch_ends(self.moves.expire(now_ms))

    def _touch_ends(self, orders: Iterable[Move]) -> None:
        """Mark both instances of each move as changed."""
        for order in orders:
            for worker in (order.worker, order.to):
                self.touch(worker)

    # --- replies ---------------------------------------------------------------------------------------------

    def answer(self) -> None:
        """Send pending commands to every instance with an open report. Call after the commit."""
        for instance in self._to_answer.values():
            drains = self.draining or instance.may_leave
            has_news = instance.commands.pending or (drains and not instance.drain_sent)
            if has_news and instance.call is not None:
                self._reply(instance)
        self._to_answer.clear()

    def answer_due(self, now_ms: int) -> None:
        """Reply to the reports whose wait time has passed."""
        for instance in self:
            if instance.call is not None and instance.due_ms <= now_ms:
                self._reply(instance)

    def drain(self) -> None:
        """Notify every instance once that no more work follows; open reports get it with the next ``answer``."""
        self.draining = True
        self._to_answer = dict(self._by_worker)

    def release(self, instance: Instance, *, leaves: bool) -> None:
        """Let an instance leave once it has finished its groups, or take that back."""
        instance.released = leaves
        self._to_answer[instance.worker] = instance
        self.touch(instance.worker)

    def _reply(self, instance: Instance) -> None:
        call, instance.call = instance.call, None
        if call is not None and not call.done:
            commands, drains = instance.commands, self.draining or instance.may_leave
            instance.drain_sent = drains
            call.reply(Commands(first=commands.acked + 1, commands=commands.take(), version=self.newest, drain=drains))

    def order_pull(self, instance: Instance, lineage: Lineage, version: Version, now_ms: int) -> None:
        """Order an instance to load weights."""
        instance.order_pull(lineage, version, now_ms)
        self.touch(instance.worker)
        self._to_answer[instance.worker] = instance

    def pin(self, instance: Instance, weights: tuple[Lineage, Version]) -> None:
        """Reserve an instance for an evaluation with these weights: it starts no groups until it has loaded them."""
        instance.pinned = weights
        self.touch(instance.worker)

    def unpin(self, instance: Instance) -> None:
        """Let an instance load newer weights again."""
        instance.pinned, instance.evaluation = None, 0
        self.touch(instance.worker)

    def evaluate(self, instance: Instance, command: Evaluate, now_ms: int) -> None:
        """Order an instance to play an evaluation, and to load its weights if needed."""
        instance.evaluation = command.ticket
        weights = (command.lineage, command.version)
        if (instance.loaded() if instance.pull is None else instance.pull) != weights:
            self.order_pull(instance, *weights, now_ms)
        self._order(instance, command)

    def end_evaluation(self, instance: Instance, ticket: int) -> None:
        """Order an instance to discard an evaluation, once."""
        command = EndEvaluation(ticket=ticket)
        if command not in instance.commands.pending:
            self._order(instance, command)

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
