"""Evaluations by rollout workers: outside the ledger, so they take no place in the window and leave no trace line.

- A worker with a share is pinned to the version of its evaluation: it is ordered to load no other one, and starts
  groups with that version as far as the bound admits. It may have to load an older version; then it finishes its groups
  first, since no token of a group may be older than its lease.
- As many workers are pinned at once as the widest running evaluation allows. Several sets that are due at one version
  are played one after another, by workers that have it loaded.
- A share whose worker leaves, stops reporting or fails goes to another worker, with the prompts that have no scores
  yet. The ticket of its command fences the earlier worker.
- Scores are kept in memory, evaluations that are due in the store: a restarted scheduler has them played again.
"""

import logging
from pathlib import Path

import msgspec

from staleflow.metrics.evaluation import set_metrics
from staleflow.net.endpoint import Call
from staleflow.protocols.consistency.effects import Code, Published
from staleflow.protocols.consistency.ids import Lineage, Version
from staleflow.protocols.wire.messages import Done, Evaluate, PutScores
from staleflow.servers.scheduler.coordination.instance import Instance
from staleflow.servers.scheduler.evaluation.schedule import Due, Schedule
from staleflow.servers.scheduler.evaluation.shares import Evaluation, Share
from staleflow.servers.scheduler.ledger.pending_replies import PendingReplies
from staleflow.servers.scheduler.state import SchedulerState
from staleflow.servers.scheduler.status.step_metrics import StepMetrics

log = logging.getLogger(__name__)

SCORES = "evaluations.jsonl"
"""File of the run directory with a line for each prompt of each evaluation."""
MAX_FAILURES = 3
"""Failures after which an evaluation is given up."""
FIRST_RETRY_MS = 1_000
"""Delay after the first failure; it doubles with each one."""
WORKER_TIMEOUT_MS = 60_000
"""Time without any worker that plays evaluations, after which a trained run ends without the ones that remain."""
_INCARNATION_BITS = 24
"""Tickets of an incarnation start at its number shifted by this, so that none is ever reused."""


class Evaluations:
    """Gives the prompts of due evaluations to rollout workers, and collects the scores."""

    def __init__(self, state: SchedulerState, replies: PendingReplies, metrics: StepMetrics, run_dir: Path) -> None:
        self._config, self._interpreter = state.config, state.interpreter
        self._registry, self._instances = state.registry, state.instances
        self._replies = replies
        self._metrics = metrics
        self._scores_path = run_dir / SCORES
        self._schedule = Schedule(state.config.eval, state.config.trainer.steps)
        with state.interpreter.store.read() as txn:
            self._schedule.load(txn)
        self._running: dict[Due, Evaluation] = {}
        self._ticket = state.identity.incarnation << _INCARNATION_BITS
        self._without_worker_ms = 0
        """Time since which no worker could play what is due; 0 if one can, or nothing is due."""

    @property
    def pending(self) -> bool:
        """True while an evaluation runs or waits."""
        return bool(self._schedule.running)

    def versions(self) -> list[tuple[Lineage, Version]]:
        """Return the versions that unfinished evaluations need."""
        return [due.weights for due in self._schedule.unfinished()]

    def of(self, instance: Instance) -> str:
        """Return the evaluation that an instance plays; empty if it plays none."""
        evaluation, _ = self._share_of(instance.evaluation)
        return "" if evaluation is None else str(evaluation.due)

    def describe(self) -> str:
        """Describe what is not finished: each evaluation, its prompts without scores, and its last failure."""
        return "; ".join(
            f"evaluation {due}: {_progress(self._running.get(due))}" for due in self._schedule.unfinished()
        )

    def on_published(self, effect: Published) -> None:
        if self._schedule.published(effect.lineage, effect.version):
            self._save()

    def discard(self, why: str) -> None:
        """Give up every unfinished evaluation."""
        for due in self._schedule.discard(lambda _: True):
            log.warning("evaluation %s given up: %s", due, why)
        self._save()
        self._forget_discarded()

    # --- workers ---------------------------------------------------------------------------------------------

    def reported(self, instance: Instance, ticket: int, now_ms: int) -> None:
        """Process the evaluation that a report names; ``ticket`` 0: none."""
        evaluation, share = self._share_of(ticket)
        if share is not None and share.worker == instance.worker:
            share.renewed_ms = now_ms
        elif ticket:
            self._instances.end_evaluation(instance, ticket)
        evaluation, own = self._share_of(instance.evaluation)
        if evaluation and own and ticket != own.ticket and instance.has_received_evaluation():
            self._fail(evaluation, own, "the worker stopped playing it", now_ms)

    def put(self, call: Call, body: PutScores) -> None:
        """Add scores of a worker."""
        evaluation, share = self._share_of(body.ticket)
        if evaluation is None or share is None or not share.worker == body.worker == call.peer:
            detail = f"evaluation {body.ticket} is over, or another worker plays it"
            self._replies.refuse(call, Code.STALE_LEASE, detail)
            return
        if not evaluation.is_valid(body.scores):
            detail = f"scores of {evaluation.due} are not finite, or not of {evaluation.given.samples} samples"
            self._replies.refuse(call, Code.MALFORMED, detail)
            return
        now_ms = self._interpreter.clock.now_ms()
        evaluation.add(share, body.scores)
        share.renewed_ms = now_ms
        if not share.prompts:
            self._free(share)
        elif body.failure:
            self._fail(evaluation, share, body.failure, now_ms)
        if evaluation.is_finished:
            self._finish(evaluation)
        self._replies.add(call, Done())

    def assign(self, now_ms: int, *, draining: bool = False) -> None:
        """Give free shares to workers. Call it before the commands of a commit are sent.

        ``draining``: this process is shutting down.
        """
        if not self._schedule.running:
            return
        machine = self._interpreter.machine
        if gone := self._schedule.discard(lambda due: not machine.survives(*due.weights)):
            for due in gone:
                log.info("evaluation %s given up: a rollback abandoned the version", due)
            self._save()
        self._forget_discarded()
        for due in self._schedule.running.values():
            evaluation = self._running.get(due) or self._start(due, now_ms)
            self._take_back(evaluation, now_ms)
        if not draining:
            self._give(now_ms)

    def _start(self, due: Due, now_ms: int) -> Evaluation:
        place = next(place for place, given in enumerate(self._config.eval) if given.name == due.set)
        evaluation = Evaluation(due=due, given=self._config.eval[place], place=place, started_ms=now_ms)
        self._running[due] = evaluation
        return evaluation

    def _take_back(self, evaluation: Evaluation, now_ms: int) -> None:
        """Free the shares whose worker is gone, or has sent no report for the time of a lease."""
        for share in evaluation.shares:
            if share.worker is None:
                continue
            instance = self._instances.get(share.worker)
            if instance is None or instance.pinned != evaluation.due.weights or instance.evaluation != share.ticket:
                log.warning("evaluation %s: %s is lost", evaluation.due, share.worker)
                share.release()
            elif now_ms - share.renewed_ms > self._interpreter.limits.lease_ms:
                log.warning("evaluation %s: no report from %s", evaluation.due, share.worker)
                evaluation.failed_workers.add(share.worker)
                self._free(share)

    def _give(self, now_ms: int) -> None:
        evaluations = [evaluation for evaluation in self._running.values() if now_ms >= evaluation.not_before_ms]
        num_pinned = sum(instance.pinned is not None for instance in self._instances)
        limit = max((evaluation.given.workers for evaluation in evaluations), default=0)
        for evaluation in evaluations:
            self._order_ready(evaluation, now_ms)
            while num_pinned < limit and (instance := self._choose(evaluation)) is not None:
                if not evaluation.shares:
                    evaluation.split(self._num_prompts(instance, evaluation))
                share = next((share for share in evaluation.shares if share.prompts and share.worker is None), None)
                if share is None:
                    break
                share.worker, share.renewed_ms = instance.worker, now_ms
                self._instances.pin(instance, evaluation.due.weights)
                num_pinned += 1
                self._order_ready(evaluation, now_ms)

    def _order_ready(self, evaluation: Evaluation, now_ms: int) -> None:
        """Order the shares whose worker may load the version now: it is not older than the one it has, or no group of
        the worker would get tokens of it."""
        for share in evaluation.shares:
            instance = None if share.worker is None or share.ticket else self._instances.get(share.worker)
            if instance is None:
                continue
            share.renewed_ms = now_ms
            if _target(instance) <= evaluation.due.weights or not instance.leases:
                self._ticket += 1
                share.ticket = self._ticket
                command = Evaluate(
                    ticket=share.ticket,
                    set=evaluation.given.name,
                    lineage=evaluation.due.lineage,
                    version=evaluation.due.version,
                    prompts=list(share.prompts),
                )
                self._instances.evaluate(instance, command, now_ms)

    def _choose(self, evaluation: Evaluation) -> Instance | None:
        """Return the least busy worker that can play the set, preferably one that has not failed it and has no newer
        version."""
        able = [i for i in self._instances if i.pinned is None and i.stays and self._num_prompts(i, evaluation)]

        def rank(instance: Instance) -> tuple[bool, bool, int]:
            failed = instance.worker in evaluation.failed_workers
            return failed, _target(instance) > evaluation.due.weights, len(instance.leases)

        return min(able, key=rank, default=None)

    def _num_prompts(self, instance: Instance, evaluation: Evaluation) -> int:
        """Return the number of prompts that an instance has of a set; 0 if it cannot play it.

        All workers of an evaluation must have the same number: the shares refer to prompts by their numbers.
        """
        process = self._registry.get(instance.worker)
        counts = [] if process is None else process.attach.eval_prompts
        count = counts[evaluation.place] if len(counts) == len(self._config.eval) else 0
        return count if not evaluation.shares or count == evaluation.num_prompts else 0

    def _free(self, share: Share) -> None:
        """Unpin the worker of a share, and end what it plays if prompts remain."""
        instance = None if share.worker is None else self._instances.get(share.worker)
        if instance is not None and instance.evaluation == share.ticket:
            self._instances.unpin(instance)
            if share.prompts and share.ticket:
                self._instances.end_evaluation(instance, share.ticket)
        share.release()

    def _fail(self, evaluation: Evaluation, share: Share, why: str, now_ms: int) -> None:
        """Count a failure; after ``MAX_FAILURES`` the evaluation ends with the scores that it has."""
        log.warning("evaluation %s failed at %s: %s", evaluation.due, share.worker, why)
        if share.worker is not None:
            evaluation.failed_workers.add(share.worker)
        self._free(share)
        evaluation.not_before_ms = now_ms + (FIRST_RETRY_MS << evaluation.failures)
        evaluation.failures += 1
        evaluation.failure = why
        if evaluation.failures >= MAX_FAILURES:
            log.error("evaluation %s given up after %d failures: %s", evaluation.due, evaluation.failures, why)
            self._finish(evaluation)

    def _share_of(self, ticket: int) -> tuple[Evaluation, Share] | tuple[None, None]:
        pairs = ((evaluation, share) for evaluation in self._running.values() for share in evaluation.shares)
        return next(((e, share) for e, share in pairs if ticket and share.ticket == ticket), (None, None))

    # --- results ---------------------------------------------------------------------------------------------

    def _finish(self, evaluation: Evaluation) -> None:
        due, given, clock = evaluation.due, evaluation.given, self._interpreter.clock
        scores = evaluation.all_scores()
        values = set_metrics(given.name, scores, samples=given.samples, pass_reward=given.pass_reward)
        values[f"eval/{given.name}/time"] = (clock.now_ms() - evaluation.started_ms) / 1000
        self._metrics.evaluation(due.lineage, due.version, values, clock.unix_ns())
        self._write(evaluation)
        reward = values.get(f"eval/{given.name}/reward")
        shown = "no reward" if reward is None else f"reward {reward:.3f}"
        log.info("evaluation %s: %s over %d prompts", due, shown, evaluation.num_prompts)
        self._schedule.finish(given.name)
        self._save()
        self._forget_discarded()

    def _write(self, evaluation: Evaluation) -> None:
        head = {"set": evaluation.due.set, "lineage": evaluation.due.lineage, "version": evaluation.due.version}
        lines = (head | msgspec.structs.asdict(evaluation.scores[prompt]) for prompt in sorted(evaluation.scores))
        try:
            with self._scores_path.open("ab") as file:
                file.writelines(msgspec.json.encode(line) + b"\n" for line in lines)
        except OSError as error:
            log.warning("scores of evaluation %s not written to %s: %s", evaluation.due, self._scores_path, error)

    def _forget_discarded(self) -> None:
        """End the evaluations that the schedule no longer runs."""
        kept = set(self._schedule.running.values())
        for due in [due for due in self._running if due not in kept]:
            for share in self._running.pop(due).shares:
                self._free(share)

    def _save(self) -> None:
        self._interpreter.with_commit(self._schedule.save)

    # --- the end ---------------------------------------------------------------------------------------------

    def give_up_without_workers(self, now_ms: int) -> None:
        """Discard what remains if no worker that could play it has been attached for ``WORKER_TIMEOUT_MS``."""
        able = any(self._num_prompts(i, evaluation) for evaluation in self._running.values() for i in self._instances)
        if able or not self.pending:
            self._without_worker_ms = 0
            return
        self._without_worker_ms = self._without_worker_ms or now_ms
        if now_ms - self._without_worker_ms >= WORKER_TIMEOUT_MS:
            self.discard(f"no rollout worker that plays evaluations for {WORKER_TIMEOUT_MS // 1000} s")


def _target(instance: Instance) -> tuple[Lineage, Version]:
    """Return the weights that the instance has, or will have after the pull that is ordered."""
    return instance.loaded() if instance.pull is None else instance.pull


def _progress(evaluation: Evaluation | None) -> str:
    if evaluation is None:
        return "waiting"
    if not evaluation.shares:
        return "no rollout worker plays it yet"
    players = sum(share.worker is not None for share in evaluation.shares)
    failed = f", last failure: {evaluation.failure}" if evaluation.failure else ""
    return f"{len(evaluation.scores)} of {evaluation.num_prompts} prompts scored, {players} workers{failed}"
