"""The coordination cycle: take a snapshot of the run, let the strategies decide, and execute their orders.

A cycle runs at most once per drain and only if an input of a strategy has changed. Afterwards it pauses ten times as
long as the decision took, so that with many instances most of the time remains for the ledger.
"""

from collections.abc import Callable, Sequence

from staleflow.configs.schema import Config, Coordination
from staleflow.protocols.consistency import events
from staleflow.protocols.consistency.effects import Code, Delivered, Rejected
from staleflow.protocols.consistency.ids import Step, WorkerId
from staleflow.protocols.coordination import admission
from staleflow.protocols.coordination.decide import Strategies, decide
from staleflow.protocols.coordination.sync import MAX_AT_ONCE
from staleflow.protocols.coordination.view import Cost, Load, Move, Order, Start
from staleflow.protocols.wire.messages import InstanceStats
from staleflow.servers.scheduler.coordination.backoff import Backoff
from staleflow.servers.scheduler.coordination.instances import Instances
from staleflow.servers.scheduler.coordination.pacing import Pacing
from staleflow.servers.scheduler.coordination.snapshots import MAX_STARTS, Snapshots
from staleflow.servers.scheduler.ledger.interpreter import Interpreter

PAUSE_FACTOR = 10
"""Pause between two decisions, as a multiple of the duration of the last one."""


class Cycle:
    """Executes the orders of the strategies as leases and commands."""

    def __init__(
        self,
        interpreter: Interpreter,
        instances: Instances,
        backoff: Backoff,
        config: Config,
        end: Callable[[], int],
        waiting_step: Callable[[], Step | None],
        measured: Callable[[admission.Step, int, int], None],
    ) -> None:
        """``end``: returns the end of the run, an exclusive step. ``waiting_step``: returns the step whose batch the
        trainer waits for; None if it does not wait. ``measured``: called with each step, its version and the time."""
        self._interpreter = interpreter
        self._instances = instances
        self._strategies = strategies(config.coordination)
        self._pacing = Pacing(interpreter.limits, waiting_step, measured)
        interpreter.listen(Delivered, self._pacing.on_delivered)
        self._snapshots = Snapshots(interpreter, instances, backoff, config, end, self._pacing)
        self.unfinished = False
        """The cycle left work undone; another one should follow soon."""
        self._not_before_ns = 0

    @property
    def resting(self) -> bool:
        """True if the pause after the last decision is not over yet."""
        return self._interpreter.clock.now_ns() < self._not_before_ns

    def cost_of(self, worker: WorkerId) -> Cost | None:
        """Return the cost model of an instance; None without one."""
        return None if self._snapshots.costs is None else self._snapshots.costs.of(worker)

    def observe(self, worker: WorkerId, stats: InstanceStats) -> None:
        """Update the cost model of an instance from its report, if a strategy uses one."""
        if self._snapshots.costs is not None:
            self._snapshots.costs.observe(worker, stats)

    def run(self, now_ms: int, *, may_start: bool) -> None:
        """Run one cycle. With ``may_start`` False, it starts no groups but still orders instances to load weights."""
        self.unfinished = False
        started_ns = self._interpreter.clock.now_ns()
        if not self._instances.changed:
            return
        if started_ns < self._not_before_ns:
            self.unfinished = True
            return
        self._instances.changed = False
        self._pacing.update(self._interpreter.machine, now_ms)
        orders = decide(self._snapshots.take(now_ms, may_start=may_start), self._strategies)
        ended_ns = self._interpreter.clock.now_ns()
        self._not_before_ns = ended_ns + PAUSE_FACTOR * (ended_ns - started_ns)
        self._carry_out(orders, now_ms)

    def _carry_out(self, orders: Sequence[Order], now_ms: int) -> None:
        loads = starts = 0
        for order in orders:
            instance = self._instances.get(order.worker)
            if instance is None:
                continue
            match order:
                case Load():
                    loads += 1
                    self._instances.order_pull(instance, order.lineage, order.version, now_ms)
                case Start():
                    starts += len(order.groups)
                    self._start(order)
                case Move():
                    self._instances.order_move(order, now_ms)
        if loads >= MAX_AT_ONCE or starts >= MAX_STARTS:
            self._instances.changed = self.unfinished = True

    def _start(self, order: Start) -> None:
        """Take groups from the prompt queue and lease them. A group that the ledger rejects returns to the queue."""
        prompts, snapshots = self._interpreter.prompts, self._snapshots
        for group in order.groups:
            prompts.pop_group(group)
            effects = self._interpreter.apply(events.Reserve(group=group, worker=order.worker, version=order.version))
            if effects and isinstance(effects[0], Rejected) and effects[0].code is not Code.DUPLICATE:
                prompts.requeue(group)
                return
            snapshots.last_served = order.worker
            if snapshots.affinity is not None:
                snapshots.affinity.record(group % prompts.rows, order.worker)


def strategies(chosen: Coordination) -> Strategies:
    """Return the settings of the configuration that ``decide`` needs."""
    return Strategies(
        routing=chosen.routing,
        min_gain=chosen.min_gain,
        sync=chosen.sync,
        sync_threshold=chosen.sync_threshold,
        migration=chosen.migration,
        migration_gap=chosen.migration_gap,
        admission=chosen.admission,
    )
