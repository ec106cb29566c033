"""Reply to ``GetStatus``: one plain dictionary that always has the same keys."""

from collections.abc import Callable
from dataclasses import asdict
from heapq import nlargest
from typing import Any

import msgspec

from staleflow.configs.schema import Config
from staleflow.configs.stages import graph
from staleflow.net.security import security_mode
from staleflow.protocols.consistency.limits import Bound
from staleflow.protocols.wire import messages
from staleflow.protocols.wire.messages import Command
from staleflow.servers.scheduler.coordination.backoff import Backoff
from staleflow.servers.scheduler.coordination.instance import Instance
from staleflow.servers.scheduler.coordination.instances import Instances
from staleflow.servers.scheduler.coordination.sentences import Hold
from staleflow.servers.scheduler.ledger.identity import Identity
from staleflow.servers.scheduler.ledger.interpreter import Interpreter
from staleflow.servers.scheduler.ledger.phase import Phase
from staleflow.servers.scheduler.status.deadlock import Deadlock
from staleflow.servers.scheduler.status.stage_loads import (
    Load,
    StageLoadTable,
    calls_limit,
    calls_under_way,
    episodes_limit,
)
from staleflow.servers.scheduler.status.step_metrics import StepMetrics
from staleflow.servers.scheduler.status.why import Why
from staleflow.servers.scheduler.workers.registry import Process, Registry

MIN_CACHED_PEERS = 64
"""With more processes than this, most of a reply is cached for ``CACHE_MS``: building it takes time from the ledger."""
CACHE_MS = 1_000
"""Lifetime of a cached reply."""
MAX_SILENT_ROWS = 64
"""Maximum number of silent processes in a reply."""


class StatusView:
    """Read-only view of the scheduler that builds status replies."""

    def __init__(
        self,
        config: Config,
        identity: Identity,
        interpreter: Interpreter,
        registry: Registry,
        instances: Instances,
        metrics: StepMetrics,
        deadlock: Deadlock,
        backoff: Backoff,
        phase: Phase,
        loads: StageLoadTable,
        is_trainer_waiting: Callable[[], bool],
        run_dir: str,
    ) -> None:
        """``is_trainer_waiting``: returns whether the trainer waits for its current batch."""
        self._config = config
        self._identity = identity
        self._interpreter = interpreter
        self._registry = registry
        self._instances = instances
        self._metrics = metrics
        self._phase = phase
        self._why = Why(config, interpreter, registry, instances, deadlock, backoff, phase, loads, is_trainer_waiting)
        self._loads = loads
        self._backoff = backoff
        self._stages = graph(config)
        self._started_ms = interpreter.clock.now_ms()
        self._run_dir = run_dir
        self._newest: tuple[int, dict[str, Any]] = (-CACHE_MS, {})

    def why(self) -> str:
        """Explain in one sentence what the run waits for."""
        return self._why.sentence()

    def values(self, present: set[str]) -> dict[str, Any]:
        """Build the reply. ``present``: peers that the transport is connected to.

        With many peers, the reply may be up to ``CACHE_MS`` old, except for the fields of ``_run``: a trainer that has
        just joined publishes under the term that it reads there.
        """
        now = self._interpreter.clock.now_ms()
        built_ms, newest = self._newest
        if len(present) > MIN_CACHED_PEERS and now - built_ms < CACHE_MS:
            return newest | self._run(now)
        values = self._values(now, present)
        self._newest = now, values
        return values

    def _values(self, now: int, present: set[str]) -> dict[str, Any]:
        return {
            **self._run(now),
            **self._ledger(),
            "why": self.why(),
            "trainer_waits": self._why.trainer_waits(),
            "staleness": self._staleness(),
            "recent": self._interpreter.trace.recent.lines(),
            "instances": self._instance_rows(now, present),
            **self._workers(now, present),
            "stages": self._stage_rows(),
            "shards": [
                {"shard": shard, "used_share": share, "full": full}
                for shard, (share, full) in enumerate(zip(self._loads.used_shares, self._loads.full, strict=True))
            ],
            "totals": msgspec.to_builtins(self._interpreter.totals.counts),
            "lengths": self._lengths(),
            "violations": self._interpreter.totals.counts.violations,
            "metrics": self._metrics.last,
            "first_metrics": self._metrics.first,
            "finished": self._phase.finished,
            "drained": self._phase.drained,
            "error": self._phase.error,
            "closed": self._phase.closed,
            "full": self._interpreter.full,
            "map_used": self._interpreter.store.used_share(),
        }

    def _run(self, now: int) -> dict[str, Any]:
        machine = self._interpreter.machine
        staleness = self._config.staleness
        return {
            "run": self._identity.run,
            "run_dir": self._run_dir,
            "parameters": self._registry.parameters(),
            "incarnation": self._identity.incarnation,
            "uptime_s": (now - self._started_ms) / 1000,
            "run_s": self._interpreter.totals.counts.served_s if self._phase.closed else self._interpreter.served_s,
            "lineage": machine.lineage,
            "version": machine.version,
            "next_step": machine.next_step,
            "steps": self._config.trainer.steps,
            "trainer_term": machine.trainer_term,
            "max_staleness": staleness.max_staleness,
            "bound": staleness.bound.value,
            "on_overdue": staleness.on_overdue.value,
            "batch_size": self._config.trainer.batch_size,
            "group_size": self._config.rollout.group_size,
            "max_inflight": self._config.rollout.max_inflight,
            "security": security_mode(self._config),
        }

    def _lengths(self) -> dict[str, Any]:
        lengths = self._interpreter.prompts.lengths
        ranker = self._config.coordination.ranker
        return {"ranker": ranker, "described": lengths.num_described, **lengths.quality()}

    def _ledger(self) -> dict[str, Any]:
        machine = self._interpreter.machine
        rows = [
            {"deadline": deadline, "leased": leased, "pushed": pushed, "occupied": occupied}
            for deadline, leased, pushed, occupied in machine.window()
        ]
        pinned = {"step": machine.next_step, "groups": [asdict(pin) for pin in self._why.pins()]}
        return {"ledger": machine.state_counts(), "window": rows, "pinned": pinned}

    def _staleness(self) -> dict[str, list[tuple[int, int]]]:
        """Return (version lag, groups), ascending. Under the token bound, the version of a live group is unknown."""
        machine, bound = self._interpreter.machine, self._interpreter.limits
        live: list[tuple[int, int, int]] = []
        if bound.bound is Bound.TRAJECTORY:
            for deadline, leased, pushed, occupied in reversed(machine.window()):
                live.append((machine.version - (deadline - bound.max_staleness), leased, pushed + occupied))
        return {
            "in_flight": [(age, leased) for age, leased, _ in live],
            "in_queue": [(age, queued) for age, _, queued in live],
            "consumed": sorted(self._interpreter.totals.counts.staleness.items()),
        }

    def _instance_rows(self, now: int, present: set[str]) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        holds = {hold.worker: hold for hold in self._backoff.holds()}
        for instance in self._instances:
            process = self._registry.get(instance.worker)
            stats = instance.stats
            loading = instance.pull
            rows.append(
                {
                    "worker": instance.worker,
                    "name": "" if process is None else process.name,
                    "version": stats.version,
                    "running": stats.running,
                    "waiting": stats.waiting,
                    "kv_used": stats.kv_used,
                    "slots": stats.slots or self._config.rollout.max_inflight,
                    "tokens_per_s": stats.tokens_per_s,
                    "limit": episodes_limit(self._config, self._registry.name_of(instance.worker), stats),
                    "held": len(instance.leases),
                    "failed": _failed(holds.get("" if process is None else process.name)),
                    "loading": None if loading is None else loading[1],
                    "last_command": _command(instance, instance.commands.last),
                    "last_seen_s": 0.0 if process is None else _seen_s(process, now, present),
                }
            )
        return rows

    def _stage_rows(self) -> list[dict[str, Any]]:
        """Return a row for every stage of the run, with its workers and groups."""
        loads, workers = self._loads.by_stage(), self._registry.stage_workers()
        failing, config, rows = self._loads.failing(), self._config, list[dict[str, Any]]()
        for node in self._stages:
            load, served = loads.get(node.name, Load(0, 0)), workers.get(node.name, 0)
            rows.append(
                {
                    "stage": node.name,
                    "after": list(node.after),
                    "workers": served,
                    "waiting": load.waiting,
                    "taken": load.taken,
                    "calls": load.calls,
                    "calls_under_way": calls_under_way(config, node.name, load),
                    "limit": calls_limit(config, node.name, load, served),
                    "failing": [msgspec.structs.asdict(one) for one in failing.get(node.name, ())],
                }
            )
        return rows

    def _workers(self, now: int, present: set[str]) -> dict[str, Any]:
        """Return rows for every live process, then for those that became silent last."""
        every = self._registry.processes()
        gone = [process for process in every if not process.alive]
        newest = nlargest(MAX_SILENT_ROWS, gone, key=lambda process: process.silent_since_ms)
        listed = [*(process for process in every if process.alive), *newest]
        return {
            "workers": [self._worker_row(process, now, present) for process in listed],
            "workers_left_out": len(gone) - len(newest),
        }

    def _worker_row(self, process: Process, now: int, present: set[str]) -> dict[str, Any]:
        return {
            "worker": process.worker,
            "name": process.name,
            "role": process.role,
            "alive": process.alive,
            "pid": process.attach.pid,
            "last_seen_s": _seen_s(process, now, present),
        }


def _failed(hold: Hold | None) -> dict[str, Any] | None:
    """Return why an instance is restricted, and for how long; None if it is not."""
    return None if hold is None else {"groups": hold.failed, "held_s": hold.left_s, "detail": hold.detail}


def _command(instance: Instance, command: Command | None) -> str:
    """Describe a command in a few words: its type, and its group or version."""
    match command:
        case None:
            return ""
        case messages.Assign():
            return f"assign {command.group}"
        case messages.Pull():
            return f"pull v{command.version}"
        case _:
            lease = instance.leases.get(command.lease)
            about = f"lease {command.lease}" if lease is None else str(lease[0])
            return f"{type(command).__name__.lower()} {about}"


def _seen_s(process: Process, now: int, present: set[str]) -> float:
    """Return the seconds since the last message. A connected peer counts as at most 1 s: heartbeats update no time."""
    silent_s = (now - process.seen_ms) / 1000
    return min(silent_s, 1.0) if process.alive and process.worker in present else silent_s
