"""Reply to ``GetStatus``: the whole run in one struct."""

from heapq import nlargest
from typing import Any

from msgspec import structs

from staleflow.configs.stages import graph
from staleflow.net.security import security_mode
from staleflow.protocols.consistency.limits import Bound
from staleflow.protocols.wire import messages
from staleflow.protocols.wire.messages import Command, SchedulerStatus
from staleflow.protocols.wire.messages.status import (
    Ages,
    InstanceStatus,
    Pinned,
    StageStatus,
    WindowStatus,
    WorkerStatus,
)
from staleflow.servers.scheduler.coordination.instance import Instance
from staleflow.servers.scheduler.elastic.control import ElasticControl
from staleflow.servers.scheduler.evaluation.evaluations import Evaluations
from staleflow.servers.scheduler.state import SchedulerState
from staleflow.servers.scheduler.status.step_metrics import StepMetrics
from staleflow.servers.scheduler.status.why import Why
from staleflow.servers.scheduler.workers.registry import Process
from staleflow.servers.scheduler.workers.stage_loads import (
    Load,
    calls_limit,
    calls_under_way,
    episodes_limit,
)

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
        state: SchedulerState,
        metrics: StepMetrics,
        why: Why,
        evaluations: Evaluations,
        elastic: ElasticControl,
        run_dir: str,
    ) -> None:
        self._config, self._identity, self._phase = state.config, state.identity, state.phase
        self._interpreter, self._registry = state.interpreter, state.registry
        self._instances, self._loads = state.instances, state.loads
        self._metrics = metrics
        self._why = why
        self._evaluations = evaluations
        self._elastic = elastic
        self._stages = graph(state.config)
        self._started_ms = state.interpreter.clock.now_ms()
        self._run_dir = run_dir
        self._newest = (-CACHE_MS, SchedulerStatus())

    def status(self, present: set[str]) -> SchedulerStatus:
        """Build the reply. ``present``: peers that the transport is connected to.

        With many peers, the reply may be up to ``CACHE_MS`` old, except for the fields of ``_progress``: a trainer that
        has just joined publishes under the term that it reads there.
        """
        now = self._interpreter.clock.now_ms()
        built_ms, newest = self._newest
        if len(present) > MIN_CACHED_PEERS and now - built_ms < CACHE_MS:
            return structs.replace(newest, **self._progress(now))
        status = self._status(now, present)
        self._newest = now, status
        return status

    def _progress(self, now: int) -> dict[str, Any]:
        """Return the fields of a status that are never cached."""
        machine, interpreter = self._interpreter.machine, self._interpreter
        return {
            "parameters": self._registry.parameters(),
            "uptime_s": (now - self._started_ms) / 1000,
            "run_s": interpreter.totals.counts.served_s if self._phase.closed else interpreter.served_s,
            "lineage": machine.lineage,
            "forks": machine.forks,
            "version": machine.version,
            "checkpoints": machine.checkpoints,
            "next_step": machine.next_step,
            "trainer_term": machine.trainer_term,
        }

    def _status(self, now: int, present: set[str]) -> SchedulerStatus:
        config, interpreter, phase = self._config, self._interpreter, self._phase
        machine, counts, lengths = interpreter.machine, interpreter.totals.counts, interpreter.prompts.lengths
        workers, left_out = self._worker_rows(now, present)
        return SchedulerStatus(
            **self._progress(now),
            run=self._identity.run,
            run_dir=self._run_dir,
            incarnation=self._identity.incarnation,
            steps=config.trainer.steps,
            max_staleness=config.staleness.max_staleness,
            bound=config.staleness.bound.value,
            on_overdue=config.staleness.on_overdue.value,
            batch_size=config.trainer.batch_size,
            group_size=config.rollout.group_size,
            max_inflight=config.rollout.max_inflight,
            security=security_mode(config),
            ledger=machine.state_counts(),
            window=tuple(
                WindowStatus(deadline=deadline, leased=leased, pushed=pushed, occupied=occupied)
                for deadline, leased, pushed, occupied in machine.window()
            ),
            pinned=Pinned(step=machine.next_step, groups=tuple(self._why.pins())),
            why=self._why.sentence(),
            trainer_waits=self._why.trainer_waits(),
            recommendation=self._elastic.recommendation,
            wanted=self._elastic.wanted,
            staleness=self._ages(),
            recent=tuple(interpreter.trace.recent.lines()),
            instances=self._instance_rows(now, present),
            workers=workers,
            workers_left_out=left_out,
            stages=self._stage_rows(),
            shards=tuple(self._loads.shards),
            totals=counts,
            lengths={"ranker": config.coordination.ranker, "described": lengths.num_described, **lengths.quality()},
            violations=counts.violations,
            metrics=self._metrics.last,
            first_metrics=self._metrics.first,
            finished=phase.finished,
            trained=phase.trained,
            drained=phase.drained,
            error=phase.error,
            closed=phase.closed,
            full=interpreter.full,
            map_used=interpreter.store.used_share(),
        )

    def _ages(self) -> Ages:
        machine, bound = self._interpreter.machine, self._interpreter.limits
        rows = machine.window()[::-1] if bound.bound is Bound.TRAJECTORY else ()
        newest = machine.version + bound.max_staleness
        return Ages(
            in_flight=tuple((newest - deadline, leased) for deadline, leased, _, _ in rows),
            in_queue=tuple((newest - deadline, pushed + occupied) for deadline, _, pushed, occupied in rows),
            consumed=tuple(sorted(self._interpreter.totals.counts.staleness.items())),
        )

    def _instance_rows(self, now: int, present: set[str]) -> tuple[InstanceStatus, ...]:
        holds, limit = self._why.holds(), self._config.rollout.max_inflight
        rows: list[InstanceStatus] = []
        for instance in self._instances:
            process, stats = self._registry.get(instance.worker), instance.stats
            name = "" if process is None else process.name
            rows.append(
                InstanceStatus(
                    worker=instance.worker,
                    name=name,
                    version=stats.version,
                    running=stats.running,
                    waiting=stats.waiting,
                    kv_used=stats.kv_used,
                    slots=stats.slots or limit,
                    tokens_per_s=stats.tokens_per_s,
                    limit=episodes_limit(self._config, self._registry.name_of(instance.worker), stats),
                    held=len(instance.leases),
                    failed=holds.get(name),
                    loading=None if instance.pull is None else instance.pull[1],
                    evaluation=self._evaluations.of(instance),
                    last_command=_command(instance, instance.commands.last),
                    last_seen_s=0.0 if process is None else _seen_s(process, now, present),
                )
            )
        return tuple(rows)

    def _stage_rows(self) -> tuple[StageStatus, ...]:
        """Return a row for every stage of the run, with its workers and groups."""
        loads, workers = self._loads.by_stage(), self._registry.stage_workers()
        failing, config, rows = self._loads.failing(), self._config, list[StageStatus]()
        for node in self._stages:
            load, served = loads.get(node.name, Load(0, 0)), workers.get(node.name, 0)
            rows.append(
                StageStatus(
                    stage=node.name,
                    after=tuple(node.after),
                    workers=served,
                    waiting=load.waiting,
                    taken=load.taken,
                    calls=load.calls,
                    calls_under_way=calls_under_way(config, node.name, load),
                    limit=calls_limit(config, node.name, load, served),
                    failing=tuple(failing.get(node.name, ())),
                )
            )
        return tuple(rows)

    def _worker_rows(self, now: int, present: set[str]) -> tuple[tuple[WorkerStatus, ...], int]:
        """Return rows for every live process, then for those that became silent last, and the number of the others."""
        every = self._registry.processes()
        gone = [process for process in every if not process.alive]
        newest = nlargest(MAX_SILENT_ROWS, gone, key=lambda process: process.silent_since_ms)
        rows = tuple(
            WorkerStatus(
                worker=process.worker,
                name=process.name,
                role=process.role,
                alive=process.alive,
                pid=process.attach.pid,
                last_seen_s=_seen_s(process, now, present),
            )
            for process in (*(process for process in every if process.alive), *newest)
        )
        return rows, len(gone) - len(newest)


def _command(instance: Instance, command: Command | None) -> str:
    """Describe a command in a few words: its type, and its group or version."""
    match command:
        case None:
            return ""
        case messages.Assign():
            return f"assign {command.group}"
        case messages.Pull():
            return f"pull v{command.version}"
        case messages.Evaluate():
            return f"evaluate {command.set} v{command.version}"
        case messages.EndEvaluation():
            return "end evaluation"
        case _:
            lease = instance.leases.get(command.lease)
            about = f"lease {command.lease}" if lease is None else str(lease[0])
            return f"{type(command).__name__.lower()} {about}"


def _seen_s(process: Process, now: int, present: set[str]) -> float:
    """Return the seconds since the last message. A connected peer counts as at most 1 s: heartbeats update no time."""
    silent_s = (now - process.seen_ms) / 1000
    return min(silent_s, 1.0) if process.alive and process.worker in present else silent_s
