"""Messages in, answers out, one commit in between.

Order of one drain: every message is applied to the ledger; batches that became ready are handed out; the strategy
deals new work; all of it is committed; only then do answers leave. A long drain commits every ``COMMIT_MS``.
"""

import logging
from collections import defaultdict
from collections.abc import Callable
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
from staleflow.protocols.wire import messages
from staleflow.protocols.wire.messages import Done
from staleflow.servers.scheduler.coordination.backoff import Failures
from staleflow.servers.scheduler.coordination.cycle import Cycle
from staleflow.servers.scheduler.coordination.handoff import Yields
from staleflow.servers.scheduler.coordination.instances import Instances
from staleflow.servers.scheduler.ledger import phase as phases
from staleflow.servers.scheduler.ledger.identity import Identity
from staleflow.servers.scheduler.ledger.interpreter import Interpreter
from staleflow.servers.scheduler.ledger.model_limits import KnownLimits
from staleflow.servers.scheduler.ledger.pending_replies import RETRY_MS, Answers
from staleflow.servers.scheduler.ledger.rejects import Rejects
from staleflow.servers.scheduler.ledger.training import Training
from staleflow.servers.scheduler.operations import GroupOperations
from staleflow.servers.scheduler.prompt_features import Describing
from staleflow.servers.scheduler.prompts.failures import Setbacks
from staleflow.servers.scheduler.status.deadlock import Deadlock
from staleflow.servers.scheduler.status.prometheus import Exposition
from staleflow.servers.scheduler.status.stage_loads import Loads
from staleflow.servers.scheduler.status.status import StatusView
from staleflow.servers.scheduler.status.step_metrics import Metrics
from staleflow.servers.scheduler.workers.attachments import Attachments
from staleflow.servers.scheduler.workers.pull_reports import PullReports
from staleflow.servers.scheduler.workers.registry import Registry
from staleflow.store.base import FULL_SHARE
from staleflow.store.disk_errors import trouble
from staleflow.trace import events as trace_events

log = logging.getLogger(__name__)

COMMIT_MS = 2
"""A drain that takes longer commits in between, so that no answer waits much longer for its commit."""
TICK_S = 0.05
ROOM_TICKS = 10
"""Ticks between two looks at the room that the store has left."""
CLOSE_AFTER_MS = 5_000
"""A finished run closes its trace when nothing is in flight any more, at latest after this."""
DRAIN_MS = 60_000
"""Once a drain was requested, groups under way have so long to finish before their workers are asked to leave."""
SETTLE_MS = 120_000
"""Once a drain was requested, the trainer waits at most so long for groups under way: leases expire, stages hang."""
NO_TRAINER_MS = 60_000
"""A drained run without a trainer ends after this; a trainer that died comes back within it and saves."""
_WORKERS = ("rollout", "stage", "trainer", "relay")
"""Roles that a run which has ended has no use for."""
_IDLE_TALK = (messages.Pulled, messages.Detach, messages.Finished, messages.Drain, messages.StageLoads)
"""Answered and forgotten once the trace is closed."""
MAX_LOADED_PER_KEY = 32
"""Versions that are kept because workers of one key have loaded them, the newest of them."""
EXPECTED = 16_384
"""Payloads that a shard is asked for at once."""
_READS = (messages.Report, messages.GetRetained, messages.GetExpected, messages.GetRetainedVersions, messages.Metrics)
"""Answered even then: they change nothing that is traced."""
MAX_WHY_CHARS = 200
"""Of the reason of a drain: it is stored."""
_AGAIN = (ReleaseWhy.EXPIRED, ReleaseWhy.ABORTED, ReleaseWhy.OVERDUE, ReleaseWhy.ROLLBACK)
"""Reasons of release after which the prompt is dealt again."""


class Service:
    """The scheduler without its socket."""

    def __init__(
        self, config: Config, run_dir: Path, identity: Identity, interpreter: Interpreter, session: str = ""
    ) -> None:
        """``session``: names the start of the run or a resumption of it; a new one clears the stored phase."""
        self._interpreter = interpreter
        self._clock = interpreter.clock
        self._config = config
        self._run_dir = run_dir
        self._is_configured = (run_dir / RESOLVED).exists()
        self._lost = RateLimitedLog()
        self._answers = Answers()
        self._rejects = Rejects(interpreter.trace, interpreter.totals.rejected)
        self._registry = Registry(config.trajectories.shards, interpreter.clock)
        with interpreter.store.read() as txn:
            self._registry.load(txn)
            self.phase = phases.load(txn, session)
        self._instances = Instances(config.trajectories.shards, self._leases_of, interpreter.clock)
        self._instances.newest = interpreter.machine.version
        deck, clock, shards = interpreter.deck, interpreter.clock, config.trajectories.shards
        self._metrics = Metrics(
            run_dir / "metrics.jsonl",
            interpreter.limits,
            config.rollout.group_size,
            interpreter.totals,
            deck.lengths,
            clock,
        )
        self._metrics.resume(interpreter.machine)
        self._setbacks = Setbacks()
        self._failures = Failures(interpreter, self._instances, self._registry.name_of)
        self._loads = Loads(shards, stages(config), self._answers)
        self._deadlock = Deadlock(
            config,
            interpreter,
            self._setbacks,
            self._failures,
            self._registry.awaits,
            lambda for_ms: self._loads.all_fail(self._registry.stage_workers(), for_ms),
            self._registry.name_of,
        )
        seen = (config, identity, interpreter, self._registry, self._instances, self._metrics)
        self._status = StatusView(
            *seen,
            self._deadlock,
            self._failures,
            self.phase,
            self._loads,
            lambda: self._training.asked(),
            str(run_dir.resolve()),
        )
        known = (interpreter, self._answers, self._rejects)
        joined = (self._registry, self._instances, self.phase)
        self._attachments = Attachments(config, identity, str(run_dir), *known, *joined)
        self._pulls = PullReports(*known, self._registry, self._instances)
        self._known_limits = KnownLimits(interpreter, self._answers)
        self._training = Training(*known, self._status.why, config.trainer.steps, self._known_limits)
        self.exposition = Exposition(*seen, self._loads, self.phase, self._training.asked)
        self._describing = Describing(deck, self._registry)
        yields = Yields(interpreter, self._instances)
        self._operations = GroupOperations(*known, self._metrics, yields, self._setbacks, self._failures, shards)
        self._cycle = Cycle(
            interpreter, self._instances, self._failures, config, self._training.last, self._training.asked
        )
        self._handlers = self._table()
        self._since_ns = 0
        self._ticks = 0
        self._later = False
        self._drained_ms = self._finished_ms = self._trainer_ms = 0
        """When the run was drained and finished, and when a trainer was attached last, for this process."""
        self.peers: Callable[[], list[str]] = list
        """Peers that the transport hears; the owner of the socket sets it."""
        self.name_conflict = self._registry.name_conflict
        self.later: Callable[[], object] = lambda: None
        """Calls ``flush`` a little later; the owner of the loop sets it."""
        self._listen()
        self._enter()

    def _table(self) -> dict[type, Callable[[Call, Any], None]]:
        return {
            messages.Attach: self._attachments.attach,
            messages.Detach: self._attachments.detach,
            messages.Report: self._report,
            messages.Pulled: self._pulls.pulled,
            messages.Operations: self._operate,
            messages.GetRetained: self._retention,
            messages.GetExpected: self._inventory,
            messages.StageLoads: self._loads.report,
            messages.PromptFeatures: self._described,
            messages.Join: self._training.join,
            messages.GetBatch: self._training.next_batch,
            messages.CheckBatch: self._training.check_batch,
            messages.GetClaims: self._training.next_batch,
            messages.QuarantineGroups: self._training.quarantine,
            messages.GetModelLimits: self._known_limits.get,
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
        listen(effects.Pushed, self._setbacks.pushed)
        listen(effects.Occupied, totals.occupied)
        listen(effects.Occupied, self._setbacks.occupied)
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
        listen(effects.RolledBack, instances.on_rolled_back)
        listen(effects.RolledBack, self._on_rolled_back)
        for effect in (effects.Released, effects.Dropped, effects.Sealed, effects.Consumed, effects.Unsealed):
            listen(effect, self._on_change)

    # --- what the ledger did ---------------------------------------------------------------------------------

    def _on_reserved(self, effect: effects.Reserved) -> None:
        self._interpreter.deck.take(effect.group)

    def _on_released(self, effect: effects.Released) -> None:
        if effect.why in _AGAIN:
            later = self._config.trainer.batch_size if effect.why is ReleaseWhy.OVERDUE else 0
            self._interpreter.deck.again(effect.group, later)

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
        """One message. Its answer waits for the commit, unless it is only a look."""
        body = call.body
        kind = type(body)
        now_ns = self._clock.now_ns()
        self._attachments.heard(call.peer, now_ns // 1_000_000, call.key)
        if kind is messages.GetStatus:
            call.reply(messages.Status(values=self._status.values(set(self.peers()))))
            return
        handler = self._handlers.get(kind)
        if handler is None:
            self._answers.refuse(call, Code.MALFORMED, f"the scheduler does not answer {kind.__name__}")
        elif self._interpreter.failed and kind is not messages.Report:
            call.refuse(Code.BUSY, f"the scheduler's {trouble(self._interpreter.full)}", RETRY_MS)
        elif self.phase.closed and kind in _IDLE_TALK:
            call.reply(Done())
        elif self.phase.closed and kind is messages.Attach and not self.phase.finished:
            call.refuse(Code.BUSY, "the scheduler ends", RETRY_MS)  # its successor takes them
        elif self._has_no_use_for(body) or (self.phase.closed and kind not in _READS):
            call.refuse(Code.DENIED, RUN_IS_OVER)
        else:
            handler(call, body)
        if not self._since_ns:
            self._since_ns = now_ns
        elif now_ns - self._since_ns > COMMIT_MS * 1_000_000:
            self.flush()

    def on_gone(self, peer: str) -> None:
        """The transport hears a peer no more."""
        self._attachments.silent(peer)
        self._describing.lost(peer)

    def on_reject(self, peer: str, code: Code, _: str) -> None:
        """The transport could not read what a peer sent."""
        self._rejects.plain(peer, "message", code.value, self._clock.now_ms())

    def on_denied(self, peer: str, verb: str) -> None:
        """The transport denied a peer what its key does not allow."""
        self._rejects.plain(peer, verb, Code.DENIED.value, self._clock.now_ms())

    def on_rejected(self, address: str, public: str) -> None:
        """The transport turned a connection away."""
        self._rejects.auth(address, "", describe_rejected(public), ok=False, now_ms=self._clock.now_ms())

    def flush(self) -> None:
        """Deal, commit, answer: the end of a drain."""
        self._since_ns = 0
        now = self._clock.now_ms()
        if self._interpreter.failed:
            self._answers.release()
            return
        self._training.deliver()
        self._cycle.run(now, may_start=self._may_start())
        if self._interpreter.commit():
            self._answers.release()
            self._instances.answer()
            if self._cycle.unfinished and not self._later:
                self._later = True
                self.later()
            return
        self._instances.newest = self._interpreter.machine.version
        self._instances.reload()
        self._answers.take_back(f"the scheduler's {trouble(self._interpreter.full)}")

    def wake(self) -> None:
        """The rest of the coordination cycle is over: see what it left undone."""
        if self._cycle.resting:
            self.later()
            return
        self._later = False
        self.flush()

    def _may_start(self) -> bool:
        phase, missing = self.phase, "" in self._registry.endpoints()
        return not (phase.draining or phase.stuck or phase.suspected or self._interpreter.full or missing)

    # --- time ------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """What only time brings about."""
        now = self._clock.now_ms()
        self._ticks += 1
        if self._ticks % ROOM_TICKS == 0 and not self.phase.closed:
            self._look_at_room()
            self._look_at_files()
        if not self.phase.closed and not self._interpreter.failed:
            self._interpreter.apply(events.Tick())
            self._attachments.present(self.peers(), now)
            if self._ticks % ROOM_TICKS == 0:
                self._attachments.forget_gone()
            self._rejects.flush(now)
            if self.phase.drained and not self.phase.finished:
                self._end_drain(now)
            if self.phase.finished and (self._idle() or now - self._finished_ms > CLOSE_AFTER_MS):
                self.close(self._outcome())
        self._interpreter.deck.lengths.learn()
        self._instances.touch_pulling()
        self._instances.expire_moves(now)
        self._failures.look()
        self.flush()
        self._describing.ask()
        self._describing.answer_due(now)
        self._look_for_deadlock()
        self._training.answer_due(now)
        self._known_limits.answer_due(now)
        self._instances.answer_due(now)

    def _look_for_deadlock(self) -> None:
        """Refuse a trainer that waits for what can never come: it ends the run as for any other failure.

        On a mere suspicion nothing new starts, so that the groups under way end; a success of one of them clears it.
        """
        phase, training = self.phase, self._training
        suspected = bool(phase.suspected)
        if not (training.waits or suspected) or phase.draining or phase.closed or self._interpreter.full:
            return
        phase.suspected = self._deadlock.suspicion()
        self._instances.changed |= suspected and not phase.suspected
        if training.waits:  # between two requests of the trainer a suspicion stays
            phase.stuck = phase.suspected if self._deadlock.is_certain() else ""
            if phase.stuck:
                log.error("%s", phase.stuck)
                training.give_up(phase.stuck)

    def _idle(self) -> bool:
        counts = self._interpreter.machine.state_counts()
        return not counts["leased"] and not counts["pushed"]

    def _look_at_room(self) -> None:
        """Overload begins at 90 % of the map, or when a commit failed; it ends when there is room again."""
        interpreter = self._interpreter
        if interpreter.failed:
            interpreter.probe()
        change = interpreter.look_at_room()
        if change is not None:
            on, used = change
            resource = interpreter.full or "map"
            interpreter.trace.add(trace_events.Overload(on=on, resource=resource, used=used, limit=FULL_SHARE))

    def _look_at_files(self) -> None:
        """Write again what was deleted under the running scheduler, which a resume needs."""
        resolved, trace = self._run_dir / RESOLVED, self._interpreter.trace
        try:
            if trace.restore():
                log.error("%s was deleted while the run writes it; it is written again", trace.path)
            if self._is_configured and not resolved.exists():
                log.error("%s was deleted while the run needs it; it is written again", resolved)
                write_resolved(self._config, self._run_dir)
        except OSError as error:
            if (more := self._lost.due()) is not None:
                log.error("a deleted file of the run cannot be written again: %s%s", error, more)

    # --- rollout instances -----------------------------------------------------------------------------------

    def _report(self, call: Call, body: messages.Report) -> None:
        worker = body.worker
        instance = self._instances.get(worker)
        if instance is None or call.peer != worker:
            over = self._registry.over(worker)
            code = Code.FENCED if over else Code.DENIED
            self._answers.refuse(call, code, over or f"{worker} is not attached")
            return
        self._count_generated(worker, body.stats.generated_tokens)
        self._interpreter.apply(events.Renew(worker=worker))
        self._cycle.heard(worker, body.stats)
        ordered, since_ms, now = instance.pull, instance.pull_ms, self._clock.now_ms()
        self._instances.report(instance, call, body, now)
        if ordered is not None and instance.pull is None:
            self._metrics.pulled((now - since_ms) / 1000)

    def _count_generated(self, worker: WorkerId, generated: int) -> None:
        """An engine counts from its own beginning; what it did before this process began is counted, but for what was
        not yet saved then."""
        process = self._registry.get(worker)
        if process is not None:
            before, process.generated = process.generated, generated
            self._interpreter.totals.counts.tokens_generated += max(generated - before, 0) if before is not None else 0

    # --- shards and the parameter server ---------------------------------------------------------------------

    def _operate(self, call: Call, body: messages.Operations) -> None:
        self._operations.operations(call, body)

    def _retention(self, call: Call, body: messages.GetRetained) -> None:
        machine = self._interpreter.machine
        keep = [group for group in body.groups if machine.must_keep(group)]
        self._answers.hold(call, messages.Retained(keep=keep))

    def _inventory(self, call: Call, body: messages.GetExpected) -> None:
        found = self._interpreter.machine.expected(body.shard, body.after, EXPECTED)
        groups, shas = [group for group, _ in found], [sha for _, sha in found]
        self._answers.hold(call, messages.Expected(groups=groups, shas=shas))

    def _described(self, call: Call, body: messages.PromptFeatures) -> None:
        self._describing.described(call, body, self._clock.now_ms())

    def _versions_in_use(self, call: Call, _: messages.GetRetainedVersions) -> None:
        machine = self._interpreter.machine
        used = dict.fromkeys(machine.versions_in_use())
        claimed = defaultdict[str, set[tuple[Lineage, Version]]](set)
        for instance in self._instances:
            process = self._registry.get(instance.worker)
            for weights in (instance.loaded(), instance.pull):
                if weights is not None and machine.survives(*weights) and weights[1] >= 0:
                    claimed["" if process is None else process.key].add(weights)
        for versions in claimed.values():  # what a worker reports as loaded is its word alone
            used |= dict.fromkeys(nlargest(MAX_LOADED_PER_KEY, versions))
        self._answers.hold(call, messages.RetainedVersions(versions=sorted(used)))

    # --- the end ---------------------------------------------------------------------------------------------

    def _step_metrics(self, call: Call, body: messages.Metrics) -> None:
        machine = self._interpreter.machine
        self._metrics.step(body.step, body.values, machine, self._instances, self._clock.unix_ns())
        self._answers.hold(call, Done())

    def _finish(self, call: Call, body: messages.Finished) -> None:
        if not self._training.current(call, body.trainer_term):
            return
        self.phase.error = body.error
        self._finished()
        self._answers.hold(call, Done())

    def _finished(self) -> None:
        self.phase.finished = True
        self._enter()

    def _drain(self, call: Call, body: messages.Drain) -> None:
        if not self.phase.ending:
            self.phase.drained = body.why[:MAX_WHY_CHARS] or "asked"
            log.info("the run is drained: %s", self.phase.drained)
            self._enter()
        self._answers.hold(call, Done())

    def drain(self) -> None:
        """End this process: hand out no new work. What is acknowledged is kept, and the run continues."""
        self.phase.stopping = True
        self._instances.drain()

    def _enter(self) -> None:
        """Store the phase with the next commit, and do what it asks for."""
        now = self._clock.now_ms()
        self._interpreter.with_commit(self.phase.save)
        if self.phase.drained:
            self._drained_ms = self._drained_ms or now
            self._trainer_ms = self._trainer_ms or now
        if self.phase.finished:
            self._finished_ms = self._finished_ms or now
            self._instances.drain()

    def _has_no_use_for(self, body: messages.Request) -> bool:
        """Whether a process attaches too late. A draining run still needs its stages and its trainer."""
        if not isinstance(body, messages.Attach):
            return False
        return body.role in _WORKERS and (self.phase.finished or (body.role == "rollout" and bool(self.phase.drained)))

    def _end_drain(self, now: int) -> None:
        """Train what is under way, then release the trainer, which saves and reports the end of the run."""
        idle, since_ms = self._idle(), now - self._drained_ms
        if not self._instances.draining and (idle or since_ms >= DRAIN_MS):
            self._instances.drain()
        if any(process.alive and process.role == "trainer" for process in self._registry.processes()):
            self._trainer_ms = now
        if not (idle or since_ms >= SETTLE_MS):
            return
        self._training.end(self.phase.drained)
        if now - self._trainer_ms >= NO_TRAINER_MS:
            log.info("the drained run has no trainer: it ends at version %d", self._interpreter.machine.version)
            self._finished()

    def _outcome(self) -> str:
        """Why the trace is closed, once the run has finished."""
        early = self._interpreter.machine.version < self._config.trainer.steps
        return self.phase.error or ("drained" if self.phase.drained and early else "finished")

    def close(self, why: str) -> None:
        """Write the last line of this incarnation; nothing changes after it."""
        if not self.phase.closed:
            counts = self._interpreter.machine.state_counts()
            self._rejects.flush(self._clock.now_ms() + 10_000)
            self._interpreter.trace.add(
                trace_events.Close(why=why, reserved=counts["leased"] + counts["pushed"], occupied=counts["occupied"])
            )
            self.flush()
            self._interpreter.trace.end()
            self.phase.closed = True
