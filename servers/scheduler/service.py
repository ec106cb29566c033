"""The scheduler service: apply messages, commit, then reply.

Each drain of the socket runs in this order: apply every message to the ledger, deliver batches that became ready, run
the coordination cycle, commit everything, and only then send the replies. A long drain commits every ``COMMIT_MS``.
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from heapq import nlargest
from pathlib import Path
from typing import Any

from staleflow.configs.loading.load import RESOLVED, write_resolved
from staleflow.configs.schema import Config
from staleflow.configs.stages import stages
from staleflow.net.endpoint import Call
from staleflow.net.errors import RUN_IS_OVER
from staleflow.net.transport import describe_rejected
from staleflow.process.rate_limited_log import RateLimitedLog
from staleflow.protocols.consistency import effects, events
from staleflow.protocols.consistency.effects import Code, ReleaseWhy
from staleflow.protocols.consistency.groups import GroupView
from staleflow.protocols.consistency.ids import LeaseId, Lineage, Version, WorkerId
from staleflow.protocols.coordination.view import Cost
from staleflow.protocols.wire import messages
from staleflow.protocols.wire.messages import Done
from staleflow.servers.scheduler.coordination.backoff import Backoff
from staleflow.servers.scheduler.coordination.cycle import Cycle
from staleflow.servers.scheduler.coordination.instances import Instances
from staleflow.servers.scheduler.elastic.control import ElasticControl
from staleflow.servers.scheduler.evaluation.evaluations import Evaluations
from staleflow.servers.scheduler.ledger import phase as phases
from staleflow.servers.scheduler.ledger.identity import Identity
from staleflow.servers.scheduler.ledger.interpreter import Interpreter
from staleflow.servers.scheduler.ledger.model_limits import CurrentModelLimits
from staleflow.servers.scheduler.ledger.pending_replies import RETRY_MS, PendingReplies
from staleflow.servers.scheduler.ledger.rejects import Rejects
from staleflow.servers.scheduler.ledger.training import Training
from staleflow.servers.scheduler.operations import GroupOperations
from staleflow.servers.scheduler.prompt_features import PromptFeatureRequests
from staleflow.servers.scheduler.prompts.failures import PromptFailures
from staleflow.servers.scheduler.prompts.outcomes import RowOutcomes
from staleflow.servers.scheduler.prompts.requests import PromptRequests
from staleflow.servers.scheduler.state import SchedulerState
from staleflow.servers.scheduler.status.deadlock import Deadlock
from staleflow.servers.scheduler.status.prometheus import Exposition
from staleflow.servers.scheduler.status.status import StatusView
from staleflow.servers.scheduler.status.step_metrics import StepMetrics
from staleflow.servers.scheduler.status.why import Why
from staleflow.servers.scheduler.workers.attachments import Attachments
from staleflow.servers.scheduler.workers.pull_reports import PullReports
from staleflow.servers.scheduler.workers.registry import Registry
from staleflow.servers.scheduler.workers.stage_loads import StageLoadTable
from staleflow.store.base import FULL_SHARE
from staleflow.store.disk_errors import trouble
from staleflow.trace import events as trace_events

log = logging.getLogger(__name__)

COMMIT_MS = 2
"""Maximum time between two commits of a long drain, so that no reply waits much longer for its commit."""
TICK_INTERVAL_S = 0.05
ROOM_TICKS = 10
"""Ticks between two checks of the free space of the store."""
CLOSE_TIMEOUT_MS = 5_000
"""A finished run closes its trace once no group is in flight, and at the latest after this time."""
DRAIN_TIMEOUT_MS = 60_000
"""Time that groups in flight have to finish after a drain request, before the rollout workers are asked to leave."""
SETTLE_TIMEOUT_MS = 120_000
"""Maximum time that the trainer waits for groups in flight after a drain request: leases expire, stages may hang."""
TRAINER_TIMEOUT_MS = 60_000
"""Time after which a drained run without a trainer ends; a restarted trainer returns within it and saves."""
_WORKERS = ("rollout", "stage", "trainer", "relay", "prompts")
"""Roles that a finished run does not admit."""
_ACKED_AFTER_CLOSE = (messages.Pulled, messages.Detach, messages.Finished, messages.Drain, messages.StageLoads)
"""Requests that are acknowledged without effect once the trace is closed."""
MAX_LOADED_PER_KEY = 32
"""Maximum number of versions retained because workers of one key report them as loaded; the newest are retained."""
MAX_EXPECTED = 16_384
"""Maximum number of payloads in one ``Expected`` reply."""
_SERVED_AFTER_CLOSE = (
    messages.Report,
    messages.GetRetained,
    messages.GetExpected,
    messages.GetRetainedVersions,
    messages.Metrics,
    messages.GetOutcomes,
)
"""Requests that are served after the trace is closed: they change no traced state."""
_SERVED_WITHOUT_STORE = (messages.Report, messages.GetSubmittedRows, messages.GetOutcomes)
"""Requests that are served while the store accepts no writes."""
MAX_WHY_CHARS = 200
"""Maximum length of the reason of a drain: it is stored."""
_REQUEUED = (ReleaseWhy.EXPIRED, ReleaseWhy.ABORTED, ReleaseWhy.OVERDUE, ReleaseWhy.ROLLBACK)
"""Release reasons after which the group is requeued."""


WakeLater = Callable[[Callable[[], None]], object]


class Service:
    """The scheduler without its socket."""

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        identity: Identity,
        interpreter: Interpreter,
        *,
        session: str,
        wake_later: WakeLater,
    ) -> None:
        """``session``: id of the start of the run, or of a resumption. A new session clears the stored phase and the
        tries of failing prompts. ``wake_later`` schedules a call of its argument after a short delay."""
        self._wake_later = wake_later
        self._interpreter = interpreter
        self._clock = interpreter.clock
        self._config = config
        self._run_dir = run_dir
        self._is_configured = (run_dir / RESOLVED).exists()
        self._restore_errors = RateLimitedLog()
        self._replies = PendingReplies()
        self._rejects = Rejects(interpreter.trace, interpreter.totals.rejected)
        self._registry = Registry(config.trajectories.shards, interpreter.clock)
        with interpreter.store.read() as txn:
            self._registry.load(txn)
            self.phase = phases.load(txn, session)
            if new_session := phases.is_new_session(txn, session):
                interpreter.prompts.start_session()
        self._instances = Instances(config.trajectories.shards, self._leases_of, interpreter.clock)
        self._instances.newest = interpreter.machine.version
        prompts, clock = interpreter.prompts, interpreter.clock
        self._metrics = StepMetrics(
            run_dir / "metrics.jsonl",
            interpreter.limits,
            config.rollout.group_size,
            interpreter.totals,
            prompts.lengths,
            clock,
        )
        self._metrics.resume(interpreter.machine)
        self._prompt_failures = PromptFailures()
        self._backoff = Backoff(interpreter, self._instances, self._registry.name_of)
        self._loads = StageLoadTable(config.trajectories.shards, stages(config), self._replies)
        state = SchedulerState(
            config=config,
            identity=identity,
            interpreter=interpreter,
            registry=self._registry,
            instances=self._instances,
            phase=self.phase,
            loads=self._loads,
        )
        self._deadlock = Deadlock(state, self._prompt_failures, self._backoff)
        self._model_limits = CurrentModelLimits(interpreter, self._replies)
        self._training = Training(interpreter, self._replies, self._rejects, config.trainer.steps, self._model_limits)
        self._evaluations = Evaluations(state, self._replies, self._metrics, run_dir)
        self._why = Why(
            state, self._deadlock, self._backoff, self._training.is_trainer_waiting, self._evaluations.describe
        )
        self._elastic = ElasticControl(state, self._cost_of, new_session=new_session)
        self._status = StatusView(
            state, self._metrics, self._why, self._evaluations, self._elastic, str(run_dir.resolve())
        )
        self._attachments = Attachments(state, self._replies, self._rejects, str(run_dir), lambda: self._elastic.wanted)
        self._pulls = PullReports(state, self._replies, self._rejects)
        self.exposition = Exposition(state, self._metrics, self._training.is_trainer_waiting)
        self._feature_requests = PromptFeatureRequests(prompts, self._registry, clock.now_ms)
        self._prompt_requests = PromptRequests(state, self._replies)
        self._operations = GroupOperations(
            state,
            self._replies,
            self._rejects,
            self._metrics,
            self._prompt_failures,
            self._backoff,
            RowOutcomes(interpreter, self._metrics),
        )
        self._cycle = Cycle(
            interpreter,
            self._instances,
            self._backoff,
            config,
            self._training.end_step,
            self._training.waiting_step,
            self._elastic.step,
        )
        self._handlers = self._table()
        self._since_ns = 0
        self._ticks = 0
        self._wake_scheduled = False
        self._drained_ms = self._finished_ms = self._trainer_ms = 0
        """Times of the drain, of the finish, and of the last attached trainer, as seen by this process; 0: never."""
        self._connected: set[str] = set()
        """Peers that the transport is connected to: those of the last tick, and of every message and loss since."""
        self.name_conflict = self._registry.name_conflict
        self._listen()
        self._enter()

    def _table(self) -> dict[type, Callable[[Call, Any], None]]:
        return {
            messages.Attach: self._attachments.attach,
            messages.Detach: self._attachments.detach,
            messages.Report: self._report,
            messages.Pulled: self._pulls.pulled,
            messages.PutScores: self._evaluations.put,
            messages.Operations: self._operations.operations,
            messages.GetRetained: self._retention,
            messages.GetExpected: self._inventory,
            messages.StageLoads: self._loads.report,
            messages.PromptFeatures: self._feature_requests.receive,
            messages.SubmitPrompts: self._prompt_requests.submit,
            messages.GetSubmittedRows: self._prompt_requests.rows,
            messages.GetOutcomes: self._prompt_requests.outcomes,
            messages.Join: self._training.join,
            messages.GetBatch: self._training.next_batch,
            messages.CheckBatch: self._training.check_batch,
            messages.GetClaims: self._training.next_batch,
            messages.QuarantineGroups: self._training.quarantine,
            messages.GetModelLimits: self._model_limits.get,
            messages.RegisterVersion: self._training.register_version,
            messages.RegisterCheckpoint: self._training.register_checkpoint,
            messages.GetRetainedVersions: self._versions_in_use,
            messages.Metrics: self._step_metrics,
            messages.Finished: self._finish,
            messages.Drain: self._drain,
        }

    def _listen(self) -> None:
        listen, instances, totals = self._interpreter.listen, self._instances, self._interpreter.totals
        listen(effects.Reserved, instances.on_reserved)
        listen(effects.Reserved, totals.reserved)
        listen(effects.Reserved, self._on_reserved)
        listen(effects.Pushed, instances.on_pushed)
        listen(effects.Pushed, totals.pushed)
        listen(effects.Pushed, self._prompt_failures.pushed)
        listen(effects.Occupied, totals.occupied)
        listen(effects.Occupied, self._prompt_failures.occupied)
        listen(effects.Released, instances.on_released)
        listen(effects.Released, totals.released)
        listen(effects.Released, self._on_released)
        listen(effects.Truncate, instances.on_truncate)
        listen(effects.Dropped, totals.dropped)
        listen(effects.Reserved, self._metrics.on_reserved)
        listen(effects.Pushed, self._metrics.on_pushed)
        listen(effects.Released, self._metrics.on_released)
        listen(effects.Sealed, self._metrics.on_sealed)
        listen(effects.Consumed, self._metrics.on_consumed)
        listen(effects.Published, self._on_published)
        listen(effects.Published, self._pulls.on_published)
        listen(effects.Published, self._evaluations.on_published)
        listen(effects.RolledBack, instances.on_rolled_back)
        listen(effects.RolledBack, self._on_rolled_back)
        for effect in (effects.Released, effects.Dropped, effects.Sealed, effects.Consumed, effects.Unsealed):
            listen(effect, self._on_change)

    @property
    def wanted(self) -> tuple[str, ...]:
        """Names of the rollout workers that should run (``rollout.elastic``); empty: all that were started."""
        return self._elastic.wanted

    def _cost_of(self, worker: WorkerId) -> Cost | None:
        return self._cycle.cost_of(worker)

    # --- effects of the ledger -------------------------------------------------------------------------------

    def _on_reserved(self, effect: effects.Reserved) -> None:
        self._interpreter.prompts.discard(effect.group)

    def _on_released(self, effect: effects.Released) -> None:
        if effect.why in _REQUEUED:
            later = self._config.trainer.batch_size if effect.why is ReleaseWhy.OVERDUE else 0
            self._interpreter.prompts.requeue(effect.group, later)

    def _on_published(self, effect: effects.Published) -> None:
        self._instances.newest = effect.version
        self._instances.changed = True

    def _on_rolled_back(self, effect: effects.RolledBack) -> None:
        self._instances.newest = effect.to_version
        self._instances.changed = True

    def _on_change(self, _: object) -> None:
        self._instances.changed = True

    def _leases_of(self, worker: WorkerId) -> dict[LeaseId, GroupView]:
        machine = self._interpreter.machine
        views = {lease: machine.group(group) for group, lease in machine.leases_of(worker)}
        return {lease: view for lease, view in views.items() if view is not None}

    # --- the socket's callbacks ------------------------------------------------------------------------------

    def on_call(self, call: Call) -> None:
        """Handle one message. Its reply waits for the commit, except for ``GetStatus``."""
        body = call.body
        kind = type(body)
        now_ns = self._clock.now_ns()
        self._connected.add(call.peer)
        self._attachments.note_message(call.peer, now_ns // 1_000_000, call.key)
        if kind is messages.GetStatus:
            call.reply(self._status.status(self._connected))
            return
        handler = self._handlers.get(kind)
        if handler is None:
            self._replies.refuse(call, Code.MALFORMED, f"the scheduler does not handle {kind.__name__}")
        elif self._interpreter.failed and kind not in _SERVED_WITHOUT_STORE:
            call.refuse(Code.BUSY, f"the scheduler's {trouble(self._interpreter.full)}", RETRY_MS)
        elif self.phase.closed and kind in _ACKED_AFTER_CLOSE:
            call.reply(Done())
        elif self.phase.closed and kind is messages.Attach and not self.phase.finished:
            call.refuse(Code.BUSY, "the scheduler is shutting down", RETRY_MS)  # the next scheduler process admits them
        elif self._is_too_late(body) or (self.phase.closed and kind not in _SERVED_AFTER_CLOSE):
            call.refuse(Code.DENIED, RUN_IS_OVER)
        else:
            handler(call, body)
        if not self._since_ns:
            self._since_ns = now_ns
        elif now_ns - self._since_ns > COMMIT_MS * 1_000_000:
            self.flush()

    def on_gone(self, peer: str) -> None:
        """Handle the loss of a peer by the transport."""
        self._connected.discard(peer)
        self._attachments.mark_silent(peer)
        self._feature_requests.remove_peer(peer)

    def on_reject(self, peer: str, code: Code, _: str) -> None:
        """Count a message that the transport could not decode."""
        self._rejects.plain(peer, "message", code.value, self._clock.now_ms())

    def on_denied(self, peer: str, verb: str) -> None:
        """Count a request that the transport denied because the peer's key does not permit it."""
        self._rejects.plain(peer, verb, Code.DENIED.value, self._clock.now_ms())

    def on_rejected(self, address: str, public: str) -> None:
        """Count a connection that the transport rejected."""
        self._rejects.auth(address, "", describe_rejected(public), ok=False, now_ms=self._clock.now_ms())

    def flush(self) -> None:
        """Finish a drain: deliver batches, run the coordination cycle, commit, then send the replies."""
        self._since_ns = 0
        now = self._clock.now_ms()
        if self._interpreter.failed:  # only refusals are pending: no request is applied before a probe succeeds
            self._replies.release()
            return
        self._training.deliver()
        # Before the cycle, which orders newer weights: a worker that is pinned now gets no such order.
        self._evaluations.assign(now, draining=self.phase.stopping or self._instances.draining)
        self._cycle.run(now, may_start=self._may_start())
        # Replies and commands leave only after the commit: a crash must not undo an acknowledged change.
        if self._interpreter.commit():
            self._replies.release()
            self._instances.answer()
            if self._cycle.unfinished and not self._wake_scheduled:
                self._wake_scheduled = True
                self._wake_later(self.wake)
            return
        # The commit failed and the ledger is back at the previous one: undo what instances and replies derived from it.
        self._instances.newest = self._interpreter.machine.version
        self._instances.reload()
        self._replies.refuse_all(f"the scheduler's {trouble(self._interpreter.full)}")

    def wake(self) -> None:
        """Continue unfinished coordination work, or schedule another call while the cycle still pauses."""
        if self._cycle.resting:
            self._wake_later(self.wake)
            return
        self._wake_scheduled = False
        self.flush()

    def _may_start(self) -> bool:
        phase, missing = self.phase, "" in self._registry.endpoints()
        return not (phase.draining or phase.stuck or phase.suspected or self._interpreter.full or missing)

    # --- time ------------------------------------------------------------------------------------------------

    def tick(self, connected: Sequence[str]) -> None:
        """Do the periodic work: expiries, liveness, room checks, timeouts of waiting calls.

        ``connected``: peers that the transport is connected to.
        """
        self._connected = set(connected)
        now = self._clock.now_ms()
        self._ticks += 1
        if self._ticks % ROOM_TICKS == 0 and not self.phase.closed:
            self._check_room()
            self._restore_files()
        if not self.phase.closed and not self._interpreter.failed:
            self._interpreter.apply(events.Tick())
            self._attachments.note_heartbeats(connected, now)
            if self._ticks % ROOM_TICKS == 0:
                self._attachments.discard_silent()
                self._prompt_requests.delete_unneeded()
            self._rejects.flush(now)
            if self.phase.drained and not self.phase.finished:
                self._end_drain(now)
            if self.phase.trained and not self.phase.finished:
                self._end_evaluations(now)
            if self.phase.finished and (self._idle() or now - self._finished_ms > CLOSE_TIMEOUT_MS):
                self.close(self._outcome())
        self._interpreter.prompts.lengths.learn()
        self._instances.touch_pulling()
        self._instances.expire_moves(now)
        self._backoff.update()
        self._elastic.tick()
        self.flush()
        self._feature_requests.reply_waiting()
        self._feature_requests.answer_due(now)
        self._prompt_requests.reply_waiting()
        self._prompt_requests.answer_due(now)
        self._check_deadlock()
        self._training.answer_due(now, self._why.sentence)
        self._model_limits.answer_due(now)
        self._instances.answer_due(now)

    def _check_deadlock(self) -> None:
        """Refuse a trainer that waits for an impossible batch; it then ends the run as after any other failure.

        A mere suspicion only stops new leases, so that the groups in flight finish; a success of one clears it.
        """
        phase, training = self.phase, self._training
        suspected = bool(phase.suspected)
        if not (training.has_waiting or suspected) or phase.draining or phase.closed or self._interpreter.full:
            return
        phase.suspected = self._deadlock.suspicion()
        self._instances.changed |= suspected and not phase.suspected
        if training.has_waiting:  # only a waiting trainer can be refused; a suspicion persists between its requests
            phase.stuck = phase.suspected if self._deadlock.is_certain() else ""
            if phase.stuck:
                log.error("%s", phase.stuck)
                training.give_up(phase.stuck)

    def _idle(self) -> bool:
        counts = self._interpreter.machine.state_counts()
        return not counts["leased"] and not counts["pushed"]

    def _check_room(self) -> None:
        """Probe a failed store, and trace the start or end of overload."""
        interpreter = self._interpreter
        if interpreter.failed:
            interpreter.probe()
        change = interpreter.check_room()
        if change is not None:
            on, used = change
            resource = interpreter.full or "map"
            interpreter.trace.add(trace_events.Overload(on=on, resource=resource, used=used, limit=FULL_SHARE))

    def _restore_files(self) -> None:
        """Restore files that were deleted during the run and that a resume needs."""
        resolved, trace = self._run_dir / RESOLVED, self._interpreter.trace
        try:
            if trace.restore():
                log.error("%s was deleted during the run; written again", trace.path)
            if self._is_configured and not resolved.exists():
                log.error("%s was deleted during the run; written again", resolved)
                write_resolved(self._config, self._run_dir)
        except OSError as error:
            if (more := self._restore_errors.due()) is not None:
                log.error("cannot restore a deleted file of the run: %s%s", error, more)

    # --- rollout instances -----------------------------------------------------------------------------------

    def _report(self, call: Call, body: messages.Report) -> None:
        worker = body.worker
        instance = self._instances.get(worker)
        if instance is None or call.peer != worker:
            end_reason = self._registry.end_reason(worker)
            code = Code.FENCED if end_reason else Code.DENIED
            self._replies.refuse(call, code, end_reason or f"{worker} is not attached")
            return
        self._count_generated(worker, body.stats.generated_tokens - body.stats.evaluated_tokens)
        self._interpreter.apply(events.Renew(worker=worker))
        self._cycle.observe(worker, body.stats)
        ordered, since_ms, now = instance.pull, instance.pull_ms, self._clock.now_ms()
        self._instances.report(instance, call, body, now)
        self._evaluations.reported(instance, body.evaluation, now)
        if ordered is not None and instance.pull is None:
            self._metrics.pulled(worker, (now - since_ms) / 1000, body.stats.paused_s)

    def _count_generated(self, worker: WorkerId, generated: int) -> None:
        """Add the tokens since the last report to the totals.

        Engines report a counter since their own start. The first report after a scheduler restart only sets the base
        of the difference: the totals contain the tokens up to the last commit.
        """
        process = self._registry.get(worker)
        if process is not None:
            before = process.generated
            # Tokens of an evaluation are subtracted once its samples end, so the difference may fall for a while.
            process.generated = generated if before is None else max(generated, before)
            self._interpreter.totals.counts.tokens_generated += max(generated - before, 0) if before is not None else 0

    # --- shards and the parameter server ---------------------------------------------------------------------

    def _retention(self, call: Call, body: messages.GetRetained) -> None:
        machine = self._interpreter.machine
        keep = [group for group in body.groups if machine.must_keep(group)]
        self._replies.add(call, messages.Retained(keep=keep))

    def _inventory(self, call: Call, body: messages.GetExpected) -> None:
        expected = self._interpreter.machine.expected(body.shard, body.after, MAX_EXPECTED)
        groups, shas = [group for group, _ in expected], [sha for _, sha in expected]
        self._replies.add(call, messages.Expected(groups=groups, shas=shas))

    def _versions_in_use(self, call: Call, body: messages.GetRetainedVersions) -> None:
        machine = self._interpreter.machine
        used = dict.fromkeys(machine.versions_in_use())
        claimed = defaultdict[str, set[tuple[Lineage, Version]]](set)
        for instance in self._instances:
            process = self._registry.get(instance.worker)
            for weights in (instance.loaded(), instance.pull):
                if weights is not None and machine.survives(*weights) and weights[1] >= 0:
                    claimed["" if process is None else process.key].add(weights)
        for versions in claimed.values():  # a limit for each key: reports of loaded versions cannot be verified
            used |= dict.fromkeys(nlargest(MAX_LOADED_PER_KEY, versions))
        used |= dict.fromkeys(weights for weights in self._evaluations.versions() if machine.survives(*weights))
        surviving = [key for key in body.stored if machine.survives(*key)]
        self._replies.add(
            call, messages.RetainedVersions(versions=sorted(used), lineage=machine.lineage, surviving=surviving)
        )

    # --- the end ---------------------------------------------------------------------------------------------

    def _step_metrics(self, call: Call, body: messages.Metrics) -> None:
        machine = self._interpreter.machine
        values = self._elastic.add(body.values)
        self._metrics.step(body.step, values, machine, self._instances, self._clock.unix_ns())
        self._replies.add(call, Done())

    def _finish(self, call: Call, body: messages.Finished) -> None:
        if not self._training.current(call, body.trainer_term):
            return
        self.phase.error = body.error
        self.phase.trained = True
        if body.error:
            self._evaluations.discard("the trainer has failed")
        if self._evaluations.pending:
            self._enter()
        else:
            self._finished()
        self._replies.add(call, Done())

    def _end_evaluations(self, now: int) -> None:
        """Finish a trained run once no evaluation remains."""
        self._evaluations.give_up_without_workers(now)
        if not self._evaluations.pending:
            self._finished()

    def _finished(self) -> None:
        self.phase.finished = True
        self._enter()

    def _drain(self, call: Call, body: messages.Drain) -> None:
        if not self.phase.ending:
            self.phase.drained = body.why[:MAX_WHY_CHARS] or "asked"
            log.info("drain requested: %s", self.phase.drained)
            self._evaluations.discard("the run drains")
            self._enter()
        self._replies.add(call, Done())

    def drain(self) -> None:
        """Prepare the shutdown of this process: grant no new leases. The run continues with the next process."""
        self.phase.stopping = True
        self._instances.drain()

    @property
    def drain_known(self) -> bool:
        """True once every live rollout worker has been told of the drain."""
        processes = ((instance, self._registry.get(instance.worker)) for instance in self._instances)
        return all(instance.drain_sent or process is None or not process.alive for instance, process in processes)

    def _enter(self) -> None:
        """Store the phase with the next commit, and apply its consequences."""
        now = self._clock.now_ms()
        self._interpreter.with_commit(self.phase.save)
        if self.phase.drained:
            self._drained_ms = self._drained_ms or now
            self._trainer_ms = self._trainer_ms or now
        if self.phase.finished:
            self._finished_ms = self._finished_ms or now
            self._instances.drain()

    def _is_too_late(self, body: messages.Request) -> bool:
        """Return whether a process attaches too late. A draining run still needs its stages and its trainer."""
        if not isinstance(body, messages.Attach):
            return False
        return body.role in _WORKERS and (self.phase.finished or (body.role == "rollout" and bool(self.phase.drained)))

    def _end_drain(self, now: int) -> None:
        """Wait for the groups in flight, then release the trainer, which saves and reports the end of the run."""
        idle, since_ms = self._idle(), now - self._drained_ms
        if not self._instances.draining and (idle or since_ms >= DRAIN_TIMEOUT_MS):
            self._instances.drain()
        if any(process.alive and process.role == "trainer" for process in self._registry.processes()):
            self._trainer_ms = now
        if not (idle or since_ms >= SETTLE_TIMEOUT_MS):
            return
        self._training.end(self.phase.drained)
        if now - self._trainer_ms >= TRAINER_TIMEOUT_MS:
            log.info("drained run has no trainer; finished at version %d", self._interpreter.machine.version)
            self._finished()

    def _outcome(self) -> str:
        """Return the reason for closing the trace of a finished run."""
        early = self._interpreter.machine.version < self._config.trainer.steps
        return self.phase.error or ("drained" if self.phase.drained and early else "finished")

    def close(self, why: str) -> None:
        """Write the ``close`` line of this incarnation and end its trace; no state changes after it."""
        if not self.phase.closed:
            counts = self._interpreter.machine.state_counts()
            self._rejects.flush(self._clock.now_ms() + 10_000)  # a future time: all waiting lines are due
            self._interpreter.trace.add(
                trace_events.Close(why=why, reserved=counts["leased"] + counts["pushed"], occupied=counts["occupied"])
            )
            self.flush()  # commits the line before the trace ends
            self._interpreter.trace.end()
            self.phase.closed = True
