"""The coordination cycle: a snapshot of the run, the strategy's orders, and what becomes of them.

Runs at most once a drain, only when something changed that a strategy looks at, and rests ten times as long as it took
to decide: with many instances the ledger comes first.
"""

import time
from collections.abc import Callable, Sequence

from staleflow.protocols.consistency import events
from staleflow.protocols.consistency.effects import Code, Refused
from staleflow.protocols.consistency.ids import Lineage, Version, WorkerId
from staleflow.protocols.coordination import view
from staleflow.protocols.coordination.decide import decide
from staleflow.protocols.coordination.routing import Routing
from staleflow.protocols.coordination.sync import MOST_AT_ONCE
from staleflow.protocols.coordination.view import Load, Order, Snapshot, Start
from staleflow.servers.scheduler.instance import Instance
from staleflow.servers.scheduler.instances import Instances
from staleflow.servers.scheduler.interpreter import Interpreter

REST = 10
"""Time between two decisions, as a multiple of what the last one took."""
MOST_STARTS = 128
"""Groups that one cycle starts, so that nobody else waits for more than some milliseconds of leases."""


class Cycle:
    """Turns orders into leases and commands."""

    def __init__(
        self, interpreter: Interpreter, instances: Instances, routing: Routing, end: Callable[[], int]
    ) -> None:
        """``end``: the step before which the run is over."""
        self._interpreter = interpreter
        self._instances = instances
        self._routing: Routing = routing
        self._end = end
        self._last_served: WorkerId | None = None
        self.unfinished = False
        """Another cycle should follow soon."""
        self._not_before_ns = 0
        self._seen: tuple[int, int] = (-1, -1)
        self._views: dict[WorkerId, view.Instance] = {}

    def run(self, now_ms: int, *, may_start: bool) -> None:
        """One cycle. ``may_start`` False: weights are still loaded, but nothing new begins."""
        self.unfinished = False
        started_ns = time.perf_counter_ns()
        if not self._instances.changed:
            return
        if started_ns < self._not_before_ns:
            self.unfinished = True
            return
        self._instances.changed = False
        orders = decide(self._snapshot(now_ms, may_start), self._routing)
        ended_ns = time.perf_counter_ns()
        self._not_before_ns = ended_ns + REST * (ended_ns - started_ns)
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
                    starts += order.num_groups
                    self._start(order)
        if loads >= MOST_AT_ONCE or starts >= MOST_STARTS:
            self._instances.changed = self.unfinished = True

    def _start(self, order: Start) -> None:
        """Deal and lease. The ledger has the last word: what it has no room for goes back to the deck."""
        deck = self._interpreter.deck
        for _ in range(order.num_groups):
            group = deck.deal()
            if group is None:
                return
            told = self._interpreter.apply(events.Reserve(group=group, worker=order.worker, version=order.version))
            if told and isinstance(told[0], Refused) and told[0].code is not Code.DUPLICATE:
                deck.again(group)
                return
            self._last_served = order.worker

    def _snapshot(self, now_ms: int, may_start: bool) -> Snapshot:
        machine = self._interpreter.machine
        newest = machine.version
        lineage = machine.lineage_of(newest) if newest >= 0 else machine.lineage
        self._look(lineage, newest, now_ms)
        views = tuple(self._views.values())
        versions = {seen.version for seen in views if seen.usable}
        room = {version: machine.room(version) for version in sorted(versions)} if may_start else {}
        return Snapshot(
            lineage=lineage,
            version=newest,
            instances=views,
            room=room,
            prompts=min(self._interpreter.deck.left(), self._useful(), MOST_STARTS) if may_start else 0,
            last_served=self._last_served,
        )

    def _useful(self) -> int:
        """Groups that could be started and that a step to come can still train; spares come on top."""
        machine, limits = self._interpreter.machine, self._interpreter.limits
        steps_left = self._end() - machine.next_step
        if steps_left <= 0:
            return 0
        counts = machine.state_counts()
        live = counts["leased"] + counts["pushed"] + counts["occupied"]
        return max(0, steps_left * limits.batch_size + limits.max_spares - live)

    def _look(self, lineage: Lineage, newest: Version, now_ms: int) -> None:
        """Bring the views up to date: those of instances that changed, or all of them when the newest version did."""
        touched = self._instances.take_touched()
        if self._seen != (lineage, newest):
            self._seen = (lineage, newest)
            touched = [*dict.fromkeys((*self._views, *touched))]
        for worker in touched:
            instance = self._instances.get(worker)
            if instance is None:
                self._views.pop(worker, None)
            else:
                same_lineage = instance.stats.lineage == lineage
                self._views[worker] = self._view(instance, same_lineage, newest, now_ms)

    def _view(self, instance: Instance, same_lineage: bool, newest: Version, now_ms: int) -> view.Instance:
        stats = instance.stats
        machine = self._interpreter.machine
        usable = stats.version >= 0 and machine.survives(stats.lineage, stats.version)
        return view.Instance(
            worker=instance.worker,
            lineage=stats.lineage,
            version=stats.version,
            usable=usable,
            behind=newest >= 0 and not (same_lineage and stats.version == newest),
            pulling=instance.pulling(now_ms),
            stuck=instance.stuck,
            held=len(instance.leases),
            capacity=instance.capacity,
            running=stats.running,
            waiting=stats.waiting,
            kv_used=stats.kv_used,
            tokens_per_s=stats.tokens_per_s,
        )
