"""One plain sentence that says what the run waits for, for ``status`` and for a trainer that waits too long."""

from collections import Counter

from staleflow.configs.schema import Config
from staleflow.configs.stages import stages
from staleflow.protocols.consistency.groups import State
from staleflow.protocols.consistency.ids import GroupId
from staleflow.servers.scheduler.deadlock import Deadlock
from staleflow.servers.scheduler.instances import Instances
from staleflow.servers.scheduler.interpreter import Interpreter
from staleflow.servers.scheduler.phase import Phase
from staleflow.servers.scheduler.registry import Registry
from staleflow.servers.scheduler.stage_loads import Loads


class Why:
    """Looks at the same state as everybody else; keeps none."""

    def __init__(
        self,
        config: Config,
        interpreter: Interpreter,
        registry: Registry,
        instances: Instances,
        deadlock: Deadlock,
        phase: Phase,
        loads: Loads,
    ) -> None:
        self._config = config
        self._interpreter = interpreter
        self._registry = registry
        self._instances = instances
        self._deadlock = deadlock
        self._phase = phase
        self._loads = loads

    def sentence(self) -> str:
        """What anything waits for now."""
        return self._over() or self._missing() or self._step() or "nothing waits"

    def _over(self) -> str:
        phase = self._phase
        if phase.error:
            return f"the trainer stopped: {phase.error}"
        if phase.finished:
            return "the run is finished"
        if phase.stuck:
            return phase.stuck
        if phase.draining:
            return "the scheduler drains: no new work is handed out"
        if self._interpreter.full:
            return f"the scheduler's {self._interpreter.full} is full: new work waits until there is room"
        return ""

    def _missing(self) -> str:
        machine = self._interpreter.machine
        for shard, endpoint in enumerate(self._registry.endpoints()):
            if not endpoint:
                return f"trajectory server {shard} has not attached"
        if not self._registry.parameters():
            return "the parameter server has not attached"
        if not machine.trainer_term:
            return "no trainer has joined"
        if machine.version < 0:
            return f"version 0 is still to be published by {machine.trainer}"
        trainer = self._registry.get(machine.trainer)
        if trainer is not None and not trainer.alive:
            return f"trainer {trainer.name} is silent; step {machine.version} waits for it or its successor"
        if not any(True for _ in self._instances):
            return "no rollout worker is attached"
        return ""

    def _step(self) -> str:
        machine = self._interpreter.machine
        step = machine.next_step
        if step > machine.version + 1:
            return f"the trainer works on step {machine.version}; step {step - 1} is sealed ahead"
        if step >= self._config.trainer.steps:
            last = step > machine.version
            return f"the trainer works on step {machine.version}, the last" if last else "every step is trained"
        training = f"the trainer works on step {machine.version}; " if step > machine.version else ""
        pins = machine.pins()
        if pins:
            return training + self._pinned(step, pins[0], len(pins))
        counts = machine.state_counts()
        ready, need = counts["occupied"], self._config.trainer.batch_size
        parts = f"{counts['leased']} are generated, {counts['pushed']} are in stages"
        streamed = f" ({counts['claimed']} with the trainer)" if counts["claimed"] else ""
        waits = f"step {step} waits for groups: {min(ready, need)} of {need} are ready{streamed}, {parts}"
        return training + waits + self._hint(counts)

    def _hint(self, counts: dict[str, int]) -> str:
        """What keeps groups from coming, where that is plain."""
        served = self._registry.stage_workers()
        missing = [stage for stage in stages(self._config) if not served[stage]]
        if counts["pushed"] and missing:
            return f"; no {' and no '.join(missing)} worker is attached"
        if not counts["leased"] and not counts["pushed"] and not self._interpreter.deck.left():
            return "; the prompts are used up"
        if not counts["leased"] and all(instance.stats.version < 0 for instance in self._instances):
            return "; no instance has loaded weights yet"
        if likely := self._deadlock.likely():
            return f"; {likely}"
        return self._fullest(served) if counts["pushed"] else ""

    def _fullest(self, served: Counter[str]) -> str:
        """The stage that has most groups waiting, if any does."""
        loads = {stage: load for stage, load in self._loads.by_stage().items() if load.waiting}
        if not loads:
            return ""
        stage = max(loads, key=lambda name: loads[name].waiting)
        workers = f"{served[stage]} worker{'s' if served[stage] != 1 else ''}"
        return f"; {loads[stage].waiting} wait for the stage {stage} ({workers}, {loads[stage].taken} in work)"

    def _pinned(self, step: int, group: GroupId, others: int) -> str:
        held = self._interpreter.machine.group(group)
        more = f" and {others - 1} more" if others > 1 else ""
        if held is None:
            return f"step {step} is pinned by group {group}{more}"
        where = f"at {held.worker}" if held.state is State.LEASED else self._in_stages(group)
        if held.state is State.LEASED and self._instances.get(held.worker) is None:
            where += f", which is silent: its lease ends within {self._config.scheduler.lease_s:g} s"
        return f"step {step} is pinned by group {group}{more}: version {held.version}, {where}"

    def _in_stages(self, group: GroupId) -> str:
        """Where a pushed group is, as far as its trajectory server has said."""
        found = self._loads.of_group(group)
        return f"in the stage{'s' if len(found) > 1 else ''} {' and '.join(found)}" if found else "in stages"
