"""What ``GetStatus`` answers: one plain dictionary, the same keys always."""

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
from staleflow.servers.scheduler.coordination.backoff import Failures
from staleflow.servers.scheduler.coordination.instance import Instance
from staleflow.servers.scheduler.coordination.instances import Instances
from staleflow.servers.scheduler.coordination.sentences import Hold
from staleflow.servers.scheduler.ledger.identity import Identity
from staleflow.servers.scheduler.ledger.interpreter import Interpreter
from staleflow.servers.scheduler.ledger.phase import Phase
from staleflow.servers.scheduler.status.deadlock import Deadlock
from staleflow.servers.scheduler.status.stage_loads import Load, Loads, calls_limit, calls_under_way, episodes_limit
from staleflow.servers.scheduler.status.step_metrics import Metrics
from staleflow.servers.scheduler.status.why import Why
from staleflow.servers.scheduler.workers.registry import Process, Registry

MANY_PEERS = 64
"""Beyond so many processes most of an answer is used again for a while: building it takes time the ledger needs."""
FRESH_MS = 1_000
"""So long."""
MAX_GONE_ROWS = 64
"""Silent processes in an answer."""


class StatusView:
    """Reads everything, changes nothing."""

    def __init__(
        self,
        config: Config,
        identity: Identity,
        interpreter: Interpreter,
        registry: Registry,
        instances: Instances,
        metrics: Metrics,
        deadlock: Deadlock,
        failures: Failures,
        phase: Phase,
        loads: Loads,
        asked: Callable[[], bool],
        run_dir: str,
    ) -> None:
        """``asked``: the trainer waits for the batch that it would train now."""
        self._config = config
        self._identity = identity
        self._interpreter = interpreter
        self._registry = registry
        self._instances = instances
        self._metrics = metrics
        self._phase = phase
        self._why = Why(config, interpreter, registry, instances, deadlock, failures, phase, loads, asked)
        self._loads = loads
        self._failures = failures
        self._stages = graph(config)
        self._started_ms = interpreter.clock.now_ms()
        self._run_dir = run_dir
        self._newest: tuple[int, dict[str, Any]] = (-FRESH_MS, {})

    def why(self) -> str:
        """What anything waits for, in one sentence."""
        return self._why.sentence()

    def values(self, present: set[str]) -> dict[str, Any]:
        """``present``: peers that the transport hears at the moment. With many peers, as of the last second, but for
        where the run is: a trainer that has just joined publishes by its term."""
        now = self._interpreter.clock.now_ms()
        made_ms, newest = self._newest
        if len(present) > MANY_PEERS and now - made_ms < FRESH_MS:
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
        lengths = self._interpreter.deck.lengths
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
        """(versions behind, groups), ascending. Under the token bound no deadline tells the version of a live group."""
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
        holds = {hold.worker: hold for hold in self._failures.holds()}
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
        """Every stage of the run, with the workers that are there and the groups that it has."""
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
        """Every live process, then those that fell silent last."""
        every = self._registry.processes()
        gone = [process for process in every if not process.alive]
        newest = nlargest(MAX_GONE_ROWS, gone, key=lambda process: process.gone_ms)
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
    """Why an instance is held back, and for how long; None where it is not."""
    return None if hold is None else {"groups": hold.failed, "held_s": hold.left_s, "detail": hold.detail}


def _command(instance: Instance, command: Command | None) -> str:
    """In a few words: what, and about which group or version."""
    match command:
        case None:
            return ""
        case messages.Assign():
            return f"assign {command.group}"
        case messages.Pull():
            return f"pull v{command.version}"
        case _:
            known = instance.leases.get(command.lease)
            about = f"lease {command.lease}" if known is None else str(known[0])
            return f"{type(command).__name__.lower()} {about}"


def _seen_s(process: Process, now: int, present: set[str]) -> float:
    """Seconds since its last message; heartbeats, which the transport keeps to itself, count as the last second."""
    silent_s = (now - process.seen_ms) / 1000
    return min(silent_s, 1.0) if process.alive and process.worker in present else silent_s
