"""One sentence that explains what the run waits for, for ``status`` and for a trainer whose request times out.

In addition, one word for the cause of the trainer's waiting time, which can be summed up where sentences cannot.
"""

from collections.abc import Callable

from msgspec import structs

from staleflow.configs.stages import stages
from staleflow.protocols.consistency import effects
from staleflow.protocols.consistency.groups import State
from staleflow.protocols.consistency.ids import GroupId
from staleflow.protocols.wire.messages.status import Hold, Pin
from staleflow.servers.scheduler.coordination.backoff import Backoff
from staleflow.servers.scheduler.lengths.durations import Durations
from staleflow.servers.scheduler.state import SchedulerState
from staleflow.servers.scheduler.status.deadlock import Deadlock
from staleflow.servers.scheduler.status.sentences import pinned, restarted, restricted, silent, starved
from staleflow.servers.scheduler.workers.registry import CRASH_LOOP_WINDOW_MS
from staleflow.servers.scheduler.workers.stage_loads import calls_limit, episodes_limit
from staleflow.store.disk_errors import trouble

MAX_PINS = 16
"""Maximum number of pinning groups to describe; the sentence counts the others."""


class Why:
    """Explains waits from the scheduler's state; its only own state is the durations of groups."""

    def __init__(
        self,
        state: SchedulerState,
        deadlock: Deadlock,
        backoff: Backoff,
        is_trainer_waiting: Callable[[], bool],
        evaluations: Callable[[], str],
    ) -> None:
        """``is_trainer_waiting``: returns whether the trainer waits for its current batch. ``evaluations``: describes
        the evaluations that are not finished."""
        self._config, self._interpreter, self._phase = state.config, state.interpreter, state.phase
        self._registry, self._instances, self._loads = state.registry, state.instances, state.loads
        self._deadlock = deadlock
        self._backoff = backoff
        self._is_trainer_waiting = is_trainer_waiting
        self._evaluations = evaluations
        self._leased, self._staged = Durations(), Durations()
        for effect, listener in (
            (effects.Reserved, self._on_reserved),
            (effects.Pushed, self._on_pushed),
            (effects.Occupied, self._on_occupied),
            (effects.Released, self._on_released),
        ):
            state.interpreter.listen(effect, listener)

    def sentence(self) -> str:
        """Explain what the run waits for now."""
        return self._ended() or f"{self._now()}{self._holds()}"

    def _now(self) -> str:
        return self._silent() or self._missing() or f"{self._crashes()}{self._step()}" or "nothing waits"

    def trainer_waits(self) -> str:
        """Return what the trainer waits for: servers, workers, older groups, prompts, stages or engines; "" if it does
        not."""
        machine = self._interpreter.machine
        if self._ended() or machine.next_step > machine.version or not self._is_trainer_waiting():
            return ""
        if self._silent():
            return "servers"
        if self._missing():
            return "workers"
        if not machine.starved():
            return "older groups"
        counts = machine.state_counts()
        if self._lacks_prompts(counts) and self._interpreter.prompts.is_open():
            return "prompts"
        need = self._config.trainer.batch_size - counts["occupied"]
        return "stages" if counts["pushed"] >= need else "engines"

    def pins(self) -> list[Pin]:
        """Return the first ``MAX_PINS`` groups that pin the next step."""
        return [pin for group in self._interpreter.machine.pins()[:MAX_PINS] if (pin := self._pin(group)) is not None]

    def _ended(self) -> str:
        phase = self._phase
        if phase.error:
            return f"the trainer stopped: {phase.error}"
        if phase.finished:
            return f"the run was drained: {phase.drained}" if phase.drained else "the run is finished"
        if phase.trained:
            return f"training is over; the run ends after {self._evaluations() or 'its evaluations'}"
        if phase.stuck:
            return phase.stuck
        if phase.stopping:
            return "the scheduler is stopping: it grants no new leases"
        if phase.drained:
            return self._draining(phase.drained)
        if self._interpreter.full:
            return f"the scheduler's {trouble(self._interpreter.full)}; new work waits"
        return ""

    def _draining(self, why: str) -> str:
        """Explain what a draining run still does."""
        machine = self._interpreter.machine
        counts = machine.state_counts()
        if under_way := counts["leased"] + counts["pushed"]:
            left = f"{under_way} groups under way are finished"
        elif machine.next_step > machine.version:
            left = f"the trainer works on step {machine.version}"
        else:
            left = "the trainer saves"
        return f"the run drains ({why}): {left}; nothing new is leased"

    def _silent(self) -> str:
        """Name the first server that is silent or has left: everything else depends on it."""
        servers = [("trajectories", shard) for shard in range(len(self._registry.endpoints()))]
        for role, shard in (*servers, ("parameters", 0)):
            server, payload = self._registry.server(role, shard), role == "trajectories"
            attached = self._registry.endpoints()[shard] if payload else self._registry.parameters()
            if server is None:
                if attached:
                    return f"trajectory server {shard} has left" if payload else "the parameter server has left"
            elif silent_s := self._registry.silent_s(server):
                waits = (
                    "its groups cannot be pushed, rewarded or trained"
                    if payload
                    else "no version is published or loaded"
                )
                return silent(server.name, silent_s, waits)
        return ""

    def _crashes(self) -> str:
        """Name a trainer in a crash loop: at least two recent restarts."""
        trainer = self._registry.get(self._interpreter.machine.trainer)
        restarts = 0 if trainer is None else self._registry.restarts(trainer.name)
        return (
            ""
            if trainer is None or restarts < 2
            else restarted(trainer.name, restarts, CRASH_LOOP_WINDOW_MS / 1000) + "; "
        )

    def holds(self) -> dict[str, Hold]:
        """Return the restricted instances by name."""
        return self._backoff.holds()

    def _holds(self) -> str:
        """Name the restricted instances, whatever the run waits for: they burn prompts."""
        holds = self.holds()
        return f"; {restricted(holds)}" if holds else ""

    def _missing(self) -> str:
        machine = self._interpreter.machine
        for shard, endpoint in enumerate(self._registry.endpoints()):
            if not endpoint:
                return f"trajectory server {shard} has not attached"
        if not self._registry.parameters():
            return "the parameter server has not attached"
        if not machine.trainer_term:
            return "no trainer has joined"
        trainer = self._registry.get(machine.trainer)
        if machine.version < 0:
            return f"version 0 is still to be published by {machine.trainer if trainer is None else trainer.name}"
        if trainer is not None and (silent_s := self._registry.silent_s(trainer)):
            name = trainer.name if trainer.name.startswith("trainer") else f"the trainer {trainer.name}"
            waits = f"step {machine.version} waits for it or its successor"
            return f"{self._crashes()}{silent(name, silent_s, waits)}"
        if not any(True for _ in self._instances):
            return "no rollout worker is attached"
        return ""

    def _step(self) -> str:
        machine = self._interpreter.machine
        step, full = machine.next_step, self._full()
        if step > machine.version + 1:
            return f"{full}the trainer works on step {machine.version}; step {step - 1} is sealed ahead"
        if step >= self._config.trainer.steps:
            last = step > machine.version
            return f"the trainer works on step {machine.version}, the last" if last else "every step is trained"
        training = full + (f"the trainer works on step {machine.version}; " if step > machine.version else "")
        if count := len(machine.pins()):
            pins = [structs.replace(pin, left_s=None) for pin in self.pins()] if full else self.pins()
            return training + pinned(step, pins, count, self._config.staleness.on_overdue.value) + self._failing()
        counts, need = machine.state_counts(), self._config.trainer.batch_size
        hint = self._hint(counts) or self._failing()
        if not hint and (likely := self._deadlock.likely()):  # goes first: it matters most
            return f"{likely}; {training}{starved(step, need, counts)}"
        hint = hint or (self._fullest() if counts["pushed"] else "") or self._episodes()
        left_s = None if hint or full else self._staged.until_s(need - counts["occupied"])
        return training + starved(step, need, counts, left_s) + hint

    def _full(self) -> str:
        """Name the fullest trajectory server that refuses pushes, and what frees space there."""
        machine, refusing = self._interpreter.machine, [shard for shard in self._loads.shards if shard.full]
        if not refusing:
            return ""
        fullest = max(refusing, key=lambda shard: (shard.used_share or 0.0, shard.shard))
        name, share = f"trajectory server {fullest.shard}", fullest.used_share or 0.0
        if fullest.full != "map":
            return f"{name}: its {trouble(fullest.full)}; pushes wait; "
        text = f"{name} is full ({100 * share:.0f} % of trajectories.map_mb): pushes wait"
        if machine.oldest_checkpoint[1] < machine.version:
            return f"{text} until a checkpoint releases groups; "
        if machine.next_step > machine.version:
            return f"{text} until the trainer releases groups; "
        batches = self._config.staleness.max_staleness + 1
        return (
            f"{text}, and no checkpoint can free space: the groups of {batches} batch{'es' if batches > 1 else ''} "
            "must fit in 90 % of it, so a new run needs a larger one; "
        )

    def _hint(self, counts: dict[str, int]) -> str:
        """Explain missing groups by an obvious cause; empty if there is none."""
        served = self._registry.stage_workers()
        missing = [stage for stage in stages(self._config) if not served[stage]]
        if counts["pushed"] and missing:
            return f"; no {' and no '.join(missing)} worker is attached"
        if self._lacks_prompts(counts):
            if not self._interpreter.prompts.is_open():
                return "; the prompts are used up"
            waits = "it waits for prompts: none is submitted"
            clients = any(process.alive and process.role == "prompts" for process in self._registry.processes())
            return f"; {waits}" if clients else f"; {waits}, and no client is attached that submits any"
        if not counts["leased"] and all(instance.stats.version < 0 for instance in self._instances):
            return "; no instance has loaded weights yet"
        return ""

    def _lacks_prompts(self, counts: dict[str, int]) -> bool:
        """Return whether no group is in flight and no prompt is left."""
        return not counts["leased"] and not counts["pushed"] and not self._interpreter.prompts.num_left()

    def _failing(self) -> str:
        """Name the stage worker with the most failures in a row, if one fails every group."""
        failing_workers = [
            (one.failures, stage, one) for stage, failing in self._loads.failing().items() for one in failing
        ]
        if not failing_workers:
            return ""
        _, stage, one = max(failing_workers, key=lambda it: it[0])
        name, more = self._registry.name_of(one.worker), len(failing_workers) - 1
        others = f", as do {more} other workers" if more > 1 else ", as does another worker" if more else ""
        return (
            f"; {name} fails every group of the stage {stage}, {one.failures} in a row, and is held{others}: {one.why}"
        )

    def _fullest(self) -> str:
        """Name the stage with the most waiting groups, and the setting that limits it."""
        loads = {stage: load for stage, load in self._loads.by_stage().items() if load.waiting}
        if not loads:
            return ""
        stage, served = max(loads, key=lambda name: loads[name].waiting), self._registry.stage_workers()
        load = loads[stage]
        if limit := calls_limit(self._config, stage, load, served[stage]):
            return f"; {limit}"
        workers = f"{served[stage]} worker{'s' if served[stage] != 1 else ''}"
        return f"; {load.waiting} wait for the stage {stage} ({workers}, {load.taken} in work)"

    def _episodes(self) -> str:
        """Name the instance with the most queued episodes whose engine has free slots."""
        queued = sorted(self._instances, key=lambda instance: instance.stats.episodes_waiting, reverse=True)
        names = ((self._registry.name_of(instance.worker), instance.stats) for instance in queued)
        return next((f"; {limit}" for name, stats in names if (limit := episodes_limit(self._config, name, stats))), "")

    # --- pinning groups ----------------------------------------------------------------------------------------

    def _pin(self, group: GroupId) -> Pin | None:
        group_view = self._interpreter.machine.group(group)
        if group_view is None:
            return None
        now = self._interpreter.clock.now_ms()
        generated = group_view.state is State.LEASED
        took = self._leased if generated else self._staged
        silent = generated and self._instances.get(group_view.worker) is None
        return Pin(
            group=group,
            version=group_view.version,
            worker=self._registry.name_of(group_view.worker) if generated else "",
            stages=() if generated else tuple(self._loads.of_group(group)),
            so_far_s=took.so_far_s(group, now),
            left_s=took.left_s(group, now),
            lost_within_s=self._config.scheduler.lease_s if silent else None,
        )

    def _on_reserved(self, effect: effects.Reserved) -> None:
        self._leased.begin(effect.group, self._interpreter.clock.now_ms())

    def _on_pushed(self, effect: effects.Pushed) -> None:
        now = self._interpreter.clock.now_ms()
        self._leased.end(effect.group, now)
        self._staged.begin(effect.group, now)

    def _on_occupied(self, effect: effects.Occupied) -> None:
        self._staged.end(effect.group, self._interpreter.clock.now_ms())

    def _on_released(self, effect: effects.Released) -> None:
        self._leased.forget((effect.group,))
        self._staged.forget((effect.group,))
