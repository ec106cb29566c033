"""The snapshot of a coordination cycle. Views of unchanged instances are reused from the last snapshot."""

from collections import OrderedDict
from collections.abc import Callable

from staleflow.configs.rules.coordination import samples_started
from staleflow.configs.schema import Config
from staleflow.protocols.consistency.groups import GroupView, State
from staleflow.protocols.consistency.ids import GroupId, Lineage, Version, WorkerId
from staleflow.protocols.consistency.limits import Bound
from staleflow.protocols.coordination import view
from staleflow.protocols.coordination.overbooking import overbooked
from staleflow.protocols.coordination.view import Flight, Next, Snapshot
from staleflow.protocols.wire.messages import Assign
from staleflow.servers.scheduler.coordination.backoff import Backoff
from staleflow.servers.scheduler.coordination.costs import Costs
from staleflow.servers.scheduler.coordination.instance import Instance
from staleflow.servers.scheduler.coordination.instances import Instances
from staleflow.servers.scheduler.coordination.pacing import Pacing
from staleflow.servers.scheduler.ledger.interpreter import Interpreter

MAX_STARTS = 128
"""Maximum number of groups started in one cycle: granting them blocks other requests for a few milliseconds."""
FLIGHTS_INTERVAL_MS = 500
"""Interval between two scans of all leased groups; moves are not urgent."""


MAX_PROMPTS = 65_536
"""Maximum number of stored prompts; the least recently leased ones are discarded."""


class Affinity:
    """The last instance of each prompt, by row of the prompt source, so that it holds across epochs. In memory only."""

    def __init__(self) -> None:
        self._of: OrderedDict[int, WorkerId] = OrderedDict()

    def of(self, row: int) -> WorkerId | None:
        return self._of.get(row)

    def record(self, row: int, worker: WorkerId) -> None:
        """Record that the prompt was leased to ``worker``."""
        self._of[row] = worker
        self._of.move_to_end(row)
        if len(self._of) > MAX_PROMPTS:
            self._of.popitem(last=False)


class Snapshots:
    """Builds snapshots with only the inputs that the configured strategies use."""

    def __init__(
        self,
        interpreter: Interpreter,
        instances: Instances,
        backoff: Backoff,
        config: Config,
        end: Callable[[], int],
        pacing: Pacing,
    ) -> None:
        """``end``: returns the end of the run, an exclusive step."""
        chosen = config.coordination
        self._interpreter = interpreter
        self._instances = instances
        self._backoff = backoff
        self._end = end
        self._pacing = pacing
        self._started = samples_started(config.rollout)
        self._by_cost = chosen.routing == "cost_model"
        self._moves = chosen.migration != "none"
        self._overbooks = self._started > 1 and not config.environment.run
        self._counts_orders = self._by_cost or chosen.sync != "greedy" or self._overbooks
        self._flights_ms = 0
        self._viewed: tuple[int, int] = (-1, -1)
        self._views: dict[WorkerId, view.Instance] = {}
        self.costs = Costs() if self._by_cost or chosen.migration == "throughput" else None
        """Cost models of the instances, if a strategy needs them."""
        self.affinity = Affinity() if chosen.routing == "sticky" else None
        """Last instance of each prompt, if a strategy needs it."""
        self.last_served: WorkerId | None = None
        """Instance that got the last group; updated by the owner."""

    def take(self, now_ms: int, *, may_start: bool) -> Snapshot:
        """Build a snapshot; with ``may_start`` False, without groups to start."""
        machine, limits = self._interpreter.machine, self._interpreter.limits
        newest = machine.version
        lineage = machine.lineage_of(newest) if newest >= 0 else machine.lineage
        self._update_views(lineage, newest, now_ms)
        views = tuple(self._views.values())
        room = self._room(views, newest) if may_start else {}
        counts = machine.state_counts()
        most = max(room.values(), default=0)
        waits = self._pacing.waits
        return Snapshot(
            lineage=lineage,
            version=newest,
            instances=views,
            room=room,
            next=self._next(min(most, self._useful(counts), MAX_STARTS)) if most else (),
            last_served=self.last_served,
            group_size=self._started,
            batch_size=limits.batch_size,
            max_staleness=limits.max_staleness,
            leased=counts["leased"],
            pushed=counts["pushed"],
            occupied=counts["occupied"],
            spares=counts["spares"],
            sealed=counts["sealed"],
            training=limits.batch_size if self._pacing.trains(newest) else 0,
            token_bound=limits.bound is Bound.TOKEN,
            lead=self._pacing.pace.lead,
            waits=waits,
            pinning=self._pinning(now_ms) if waits and self._moves else (),
            flights=self._flights(now_ms) if self._moves else (),
            now_ms=now_ms,
        )

    def _room(self, views: tuple[view.Instance, ...], newest: Version) -> dict[Version, int]:
        versions = {instance_view.version for instance_view in views if instance_view.usable}
        if newest >= 0:
            versions.add(newest)
        machine = self._interpreter.machine
        return {version: machine.room(version) for version in sorted(versions)}

    def _useful(self, counts: dict[str, int]) -> int:
        """Return how many more groups the remaining steps can train, spares included."""
        limits = self._interpreter.limits
        steps_left = self._end() - self._interpreter.machine.next_step
        if steps_left <= 0:
            return 0
        live = counts["leased"] + counts["pushed"] + counts["occupied"]
        return max(0, steps_left * limits.batch_size + limits.max_spares - live)

    def _next(self, count: int) -> tuple[Next, ...]:
        prompts = self._interpreter.prompts
        groups = prompts.upcoming(count)
        if self._by_cost:
            lengths = prompts.lengths.expected_of(groups)
            return tuple([Next(group=g, length=length) for g, length in zip(groups, lengths, strict=True)])
        if self.affinity is not None:
            return tuple([Next(group=g, home=self.affinity.of(g % prompts.rows)) for g in groups])
        return tuple([Next(group=g) for g in groups])

    # --- instances ---------------------------------------------------------------------------------------------

    def _update_views(self, lineage: Lineage, newest: Version, now_ms: int) -> None:
        """Update the views of changed instances, or all views after a change of the newest version or lineage."""
        touched = self._instances.take_touched()
        if self.costs is not None:
            touched += self.costs.fit()
        if self._viewed != (lineage, newest):
            self._viewed = (lineage, newest)
            touched = [*dict.fromkeys((*self._views, *touched))]
        for worker in touched:
            instance = self._instances.get(worker)
            if instance is None:
                self._views.pop(worker, None)
                if self.costs is not None:
                    self.costs.forget(worker)
            else:
                same_lineage = instance.stats.lineage == lineage
                self._views[worker] = self._view(instance, same_lineage, newest, now_ms)

    def _view(self, instance: Instance, same_lineage: bool, newest: Version, now_ms: int) -> view.Instance:
        stats = instance.stats
        machine = self._interpreter.machine
        usable = stats.version >= 0 and machine.survives(stats.lineage, stats.version)
        coming = self._instances.moves.coming(instance.worker)
        pending = instance.commands.pending if self._counts_orders else ()
        ordered = sum([type(command) is Assign for command in pending]) if pending else 0
        return view.Instance(
            worker=instance.worker,
            lineage=stats.lineage,
            version=stats.version,
            usable=usable,
            # An instance that plays an evaluation loads nothing newer, and starts groups with the version it has.
            behind=instance.pinned is None and newest >= 0 and not (same_lineage and stats.version == newest),
            pulling=instance.pulling(now_ms),
            stuck=instance.stuck,
            on_hold=not self._backoff.may_start(instance),
            held=len(instance.leases) + coming,
            coming=coming,
            ordered=ordered,
            capacity=self._capacity(instance, coming, ordered),
            running=stats.running,
            waiting=stats.waiting,
            slots=stats.slots,
            kv_used=stats.kv_used,
            kv_tokens=stats.kv_tokens,
            kv_capacity=stats.kv_capacity,
            tokens_per_s=stats.tokens_per_s,
            cost=None if self.costs is None else self.costs.of(instance.worker),
        )

    def _capacity(self, instance: Instance, coming: int, ordered: int) -> int:
        """Return the maximum number of groups of an instance. With environments it is fixed, because an engine does not
        report episodes that are at a tool."""
        capacity, stats = self._backoff.capacity(instance), instance.stats
        if not self._overbooks or self._backoff.on_trial(instance.worker):
            return capacity
        return overbooked(
            capacity,
            held=len(instance.leases) + coming,
            ordered=coming + ordered,
            started=self._started,
            running=stats.running,
            waiting=stats.waiting,
            slots=stats.slots,
            kv_used=stats.kv_used,
        )

    # --- leased groups -----------------------------------------------------------------------------------------

    def _pinning(self, now_ms: int) -> tuple[Flight, ...]:
        machine = self._interpreter.machine
        group_view = (machine.group(group) for group in machine.pins())
        return tuple([self._flight(v, now_ms) for v in group_view if v is not None and v.state is State.LEASED])

    def _flights(self, now_ms: int) -> tuple[Flight, ...]:
        """Return the leased groups that are not moving; empty within ``FLIGHTS_INTERVAL_MS`` of the last scan."""
        if now_ms < self._flights_ms:
            return ()
        self._flights_ms = now_ms + FLIGHTS_INTERVAL_MS
        machine = self._interpreter.machine
        moving = self._instances.moves.pending
        leases = (item for instance in self._instances for item in instance.leases.items())
        group_view = (machine.group(group) for lease, (group, _) in leases if lease not in moving)
        return tuple([self._flight(v, now_ms) for v in group_view if v is not None and v.state is State.LEASED])

    def _flight(self, group_view: GroupView, now_ms: int) -> Flight:
        return Flight(
            group=group_view.group,
            lease=group_view.lease,
            worker=group_view.worker,
            version=group_view.version,
            deadline=group_view.deadline,
            spare=group_view.spare,
            age_ms=now_ms - group_view.granted_ms,
            length=self._interpreter.prompts.lengths.expected(GroupId(group_view.group)),
            written=self._instances.moves.written(group_view.group),
        )
