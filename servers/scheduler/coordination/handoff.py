"""Handoff of a yielded group to another instance: moved in one transaction, or left with its instance."""

from staleflow.protocols.consistency.effects import Code, Rejected
from staleflow.protocols.consistency.events import Migrate
from staleflow.protocols.consistency.groups import State
from staleflow.protocols.consistency.ids import WorkerId
from staleflow.protocols.wire.messages import RegisterYield, Result
from staleflow.servers.scheduler.coordination.instances import Instances
from staleflow.servers.scheduler.ledger.interpreter import Interpreter


class Handoffs:
    """Handles ``RegisterYield``. After a refusal, the lease stays with its instance."""

    def __init__(self, interpreter: Interpreter, instances: Instances) -> None:
        self._interpreter = interpreter
        self._instances = instances

    def hand_off(self, op: RegisterYield) -> Result:
        """Lease the group to the target of its move, if the target can still continue it."""
        group_view = self._interpreter.machine.group(op.group)
        if group_view is None or group_view.lease != op.lease or group_view.state is not State.LEASED:
            return Result(code=Code.STALE_LEASE)
        moves = self._instances.moves
        moving = moves.pending.get(op.lease)
        if moving is None:
            return Result(code=Code.DENIED, detail=f"no move of lease {op.lease} is pending; continue the group")
        to = moving.order.to
        if not self._can_continue(to, op):
            self._instances.end_move(op.lease)
            return Result(code=Code.DENIED, detail=f"{to} cannot continue version {op.version} now")
        with moves.leaving(moving.order, op.sha):
            effects = self._interpreter.apply(Migrate(group=op.group, lease=op.lease, to=to))
        if isinstance(refused := effects[0], Rejected):
            self._instances.end_move(op.lease)
            return Result(code=refused.code, detail=refused.detail)
        self._interpreter.totals.counts.moves += 1
        return Result()

    def _can_continue(self, to: WorkerId, op: RegisterYield) -> bool:
        """Return whether the target is attached and has weights that may continue the output.

        Its weights must be at least as new as the newest of the output, and a rollback must have abandoned neither.
        """
        instance, machine = self._instances.get(to), self._interpreter.machine
        if instance is None or self._instances.draining or instance.loaded() < (op.lineage, op.version):
            return False
        return machine.survives(op.lineage, op.version) and machine.survives(*instance.loaded())
