"""The rollout workers that should run: recommendations become orders within the limits of ``rollout.elastic``.

The scheduler publishes the names of the wanted workers. Their supervisor starts those that do not run. A worker that is
no longer wanted gets no further group, finishes the groups that it has, and is then asked to leave; no token is lost.
Workers that were attached by hand under other names are left alone.
"""

import logging
import math
import re
from collections.abc import Sequence

import msgspec

from staleflow.configs.pools import workers
from staleflow.configs.schema import Config
from staleflow.protocols.consistency.ids import WorkerId
from staleflow.protocols.coordination.recommend import Action, Advice, EngineLoad, slow_engines
from staleflow.servers.scheduler.coordination.instance import Instance
from staleflow.servers.scheduler.state import SchedulerState
from staleflow.store.base import Read, Write

log = logging.getLogger(__name__)

_KEY = b"wanted"
_NAME = re.compile(r"rollout-(\d+)")


class WantedWorkers:
    """Owner of the wanted names. Empty without ``rollout.elastic``: then every worker is wanted."""

    def __init__(self, state: SchedulerState, *, new_session: bool) -> None:
        """``new_session``: the run was started or resumed, with the configured number of workers."""
        self._interpreter, self._instances, self._registry = state.interpreter, state.instances, state.registry
        self._limits = state.config.rollout.elastic
        self._slow: set[str] = set()
        """Names of engines that were too slow beside the others; they do not return until the scheduler restarts."""
        self.wanted: tuple[str, ...] = ()
        if self._limits.max_workers:
            with state.interpreter.store.read() as txn:
                self.wanted = (() if new_session else self._stored(txn)) or first_names(state.config)

    def _stored(self, txn: Read) -> tuple[str, ...]:
        raw = txn.get("meta", _KEY)
        names = () if raw is None else msgspec.msgpack.decode(raw, type=tuple[str, ...])
        return tuple(name for name in names if self._owns(name))

    def _save(self, txn: Write) -> None:
        txn.put("meta", _KEY, msgspec.msgpack.encode(self.wanted))

    def _owns(self, name: str) -> bool:
        """Return whether a supervisor starts a worker of this name within the limits."""
        number = _NAME.fullmatch(name)
        return number is not None and int(number[1]) < self._limits.max_workers

    def follow(self, advice: Advice, loads: Sequence[EngineLoad]) -> None:
        """Change the wanted names as recommended.

        Wait until the workers of the last change have attached or left: a measurement of others is out of date.
        """
        attached = {name for instance in self._instances if self._owns(name := self._name(instance))}
        if not self.wanted or attached != set(self.wanted):
            return
        names, count = list(self.wanted), advice.count
        match advice.action:
            case Action.ADD:
                free = (f"rollout-{number}" for number in range(self._limits.max_workers))
                names += [name for name in free if name not in names and name not in self._slow][:count]
            case Action.REMOVE:
                count = min(count, len(names) - self._limits.min_workers)
                slow = self._too_slow(loads)
                # Slow engines first, then the newest.
                leaving = sorted(names, key=lambda name: (slow.get(name, math.inf), -_number(name)))[:count]
                self._slow |= slow.keys() & set(leaving)
                names = [name for name in names if name not in leaving]
            case _:
                return
        if len(names) == len(self.wanted):
            return
        self.wanted = tuple(sorted(names, key=_number))
        self._interpreter.with_commit(self._save)
        log.info("%s; wanted now: %s", advice.sentence, ", ".join(self.wanted))

    def _too_slow(self, loads: Sequence[EngineLoad]) -> dict[str, float]:
        """Return the speeds of the engines that are too slow beside the others, by name."""
        return {self._registry.name_of(WorkerId(load.name)): load.speed for load in slow_engines(loads)}

    def release_unwanted(self) -> None:
        """Let the workers leave that are no longer wanted."""
        if not self.wanted:
            return
        for instance in self._instances:
            name = self._name(instance)
            leaves = self._owns(name) and name not in self.wanted
            if leaves != instance.released:
                self._instances.release(instance, leaves=leaves)

    def _name(self, instance: Instance) -> str:
        return self._registry.name_of(instance.worker)


def first_names(config: Config) -> tuple[str, ...]:
    """Return the names of the workers with which a run starts."""
    return tuple(f"rollout-{number}" for number in range(len(workers(config))))


def _number(name: str) -> int:
    found = _NAME.fullmatch(name)
    return int(found[1]) if found else -1
