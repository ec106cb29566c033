"""Handoff of a yielded group to another instance: moved in one transaction, or left with its instance."""

from staleflow.protocols.consistency.effects import Code, Rejected
from staleflow.protocols.consistency.events import Migrate
from staleflow.protocols.consistency.groups import GroupView, State
from staleflow.protocols.consistency.ids import WorkerId
from staleflow.protocols.coordination.migration import place_for
from staleflow.protocols.coordination.view import Move
from staleflow.protocols.wire.messages import RegisterYield, Result
from staleflow.servers.scheduler.coordination.backoff import Backoff
from staleflow.servers.scheduler.coordination.instance import Instance
from staleflow.servers.scheduler.coordination.instances import Instances
from staleflow.servers.scheduler.ledger.interpreter import Interpreter


class Handoffs:
    """Handles ``RegisterYield``. After a refusal, the lease stays with its instance."""

    def __init__(self, interpreter: Interpreter, instances: Instances, backoff: Backoff) -> None:
        self._interpreter = interpreter
        self._instances = instances
        self._backoff = backoff

    def hand_off(self, op: RegisterYield) -> Result:
        """Lease the group to the target of its move, or to a target chosen now, if one can continue it."""
        group_view = self._interpreter.machine.group(op.group)
        if group_view is None or group_view.lease != op.lease or group_view.state is not State.LEASED:
            return Result(code=Code.STALE_LEASE)
        order: Move | Result | None = self._ordered(op)
        if order is None and op.any_target:
            order = self._choose(group_view, op)
        if isinstance(order, Result):
            return order
        if order is None:
            detail = f"no worker with version {op.version} or a newer one can take over lease {op.lease} now"
            return Result(code=Code.DENIED, detail=f"{detail}; continue the group")
        with self._instances.moves.leaving(order, op.sha):
            effects = self._interpreter.apply(Migrate(group=op.group, lease=op.lease, to=order.to))
        if isinstance(refused := effects[0], Rejected):
            self._instances.end_move(op.lease)
            return Result(code=refused.code, detail=refused.detail)
        self._interpreter.totals.counts.moves += 1
        return Result()

    def _ordered(self, op: RegisterYield) -> Move | None:
        """Return the move that the lease was ordered to make; end any other pending move of it."""
        moving = self._instances.moves.pending.get(op.lease)
        if moving is None:
            return None
        if not moving.reserved and self._can_continue(moving.order.to, op):
            return moving.order
        self._instances.end_move(op.lease)
        return None

    def _choose(self, group_view: GroupView, op: RegisterYield) -> Move | Result | None:
        """Return a move to an instance that can continue the group; None if there is none.

        If each of them is full, reserve the next free place of one, which starts no other group meanwhile, and return
        ``busy``: the worker asks again. An engine that is always given as many groups as it can hold would otherwise
        never take one over.
        """
        free = {i.worker: self._free(i) for i in self._instances if self._may_take(i, group_view, op)}
        if (to := place_for(free)) is None:
            return None
        written = self._instances.moves.written(op.group)
        order = Move(group=op.group, lease=op.lease, worker=group_view.worker, to=to, written=written)
        if free[to] > 0:
            return order
        self._instances.reserve_move(order, self._interpreter.clock.now_ms())
        return Result(code=Code.BUSY, detail=f"{to} has no free place yet; the next one is reserved for a while")

    def _may_take(self, instance: Instance, group_view: GroupView, op: RegisterYield) -> bool:
        """Return whether an instance could take over the group once it has a free place."""
        other = instance.worker != group_view.worker
        return other and self._backoff.may_start(instance) and self._can_continue(instance.worker, op)

    def _free(self, instance: Instance) -> int:
        """Return how many more groups an instance may get."""
        moves = self._instances.moves
        return self._backoff.capacity(instance) - len(instance.leases) - moves.coming(instance.worker)

    def _can_continue(self, to: WorkerId, op: RegisterYield) -> bool:
        """Return whether the target is attached to stay and has weights that may continue the output.

        Its weights must be at least as new as the newest of the output, and a rollback must have abandoned neither.
        """
        instance, machine = self._instances.get(to), self._interpreter.machine
        if instance is None or not instance.stays or self._instances.draining:
            return False
        if instance.loaded() < (op.lineage, op.version):
            return False
        return machine.survives(op.lineage, op.version) and machine.survives(*instance.loaded())
