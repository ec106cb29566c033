"""Deadlock detection: end a run that can no longer progress, with the reason; while that is only likely, explain it.

A suspicion comes first: it stops new leases, and a group that succeeds meanwhile clears it. It becomes a certainty when
no group is leased or pushed; pushed groups do not count if a stage fails every group. So a run never ends while a group
in flight may still help. A suspicion arises only from conditions that no attached engine, stage or trainer can change:

- the step needs groups, and the prompts are used up (never while clients may submit more);
- each remaining prompt has failed ``MIN_FAILURES``;
- every instance refused a thousand distinct prompts in a row, or all prompts, without a push in between;
- no group of this run ever passed the stages, or the environment: many groups failed, over at least a minute;
- no group of this run ever passed the stages, each worker of one stage has failed every group for a minute, and no
  group in flight has passed that stage.

A rollout worker that was lost in the last minutes prevents a suspicion: it may return and serve the prompts.
"""

from staleflow.configs.rules.algorithm import filter_of
from staleflow.protocols.consistency.effects import ReleaseWhy
from staleflow.protocols.wire.messages import StageFailing
from staleflow.servers.scheduler.coordination.backoff import MAX_PROMPTS, Backoff
from staleflow.servers.scheduler.prompts.failures import PromptFailures
from staleflow.servers.scheduler.state import SchedulerState

MIN_FAILURES = 5
"""Number of failures of each remaining prompt after which none is expected to succeed."""
FAILED_BATCHES, MIN_FAILING_MS = 10, 60_000
"""Minimum number of failed groups, in batches, and minimum duration of the failures, if no group ever succeeded: an
external service may start late."""
FEW_BATCHES = 4
"""Number of filtered groups in a row, in batches, after which ``likely`` reports it."""


class Deadlock:
    """Detects deadlocks from the ledger, the prompt queue and recent failures; keeps no state."""

    def __init__(self, state: SchedulerState, prompt_failures: PromptFailures, backoff: Backoff) -> None:
        self._config, self._interpreter = state.config, state.interpreter
        self._registry, self._loads = state.registry, state.loads
        self._prompt_failures = prompt_failures
        self._backoff = backoff

    # --- certain ---------------------------------------------------------------------------------------------

    def is_certain(self) -> bool:
        """Return whether no group in flight can clear a suspicion. A pushed group cannot if a stage fails every group:
        each group must pass all stages."""
        counts = self._interpreter.machine.state_counts()
        return not counts["leased"] and (not counts["pushed"] or self._failing_stage() is not None)

    def suspicion(self) -> str:
        """Explain why the next step may never be trained, and what to change; empty without a suspicion."""
        machine, prompts, backoff = self._interpreter.machine, self._interpreter.prompts, self._backoff
        if failing := self._all_fail():
            return f"step {machine.next_step} can never be trained: {failing}"
        if prompts.is_open():  # rows that are submitted later may succeed
            return ""
        if not prompts.rows or int(machine.next_step) != machine.version or not machine.starved():
            return ""
        need, ready = self._config.trainer.batch_size, machine.state_counts()["occupied"]
        step = f"step {machine.next_step} can never be trained: {ready} of {need} groups are ready"
        left = prompts.num_left()
        if not left:
            return f"{step} and the prompts are used up{self._spent()}. {self._more()}"
        if self._registry.may_return("rollout"):
            return ""
        if left == prompts.num_requeued and all(
            prompts.tries[group].failures >= MIN_FAILURES for group in prompts.requeued_groups()
        ):
            return f"{step} and each prompt that is left, {left}, failed {MIN_FAILURES} times. {self._newest()}"
        if (refused := backoff.all_refuse()) >= min(prompts.rows, MAX_PROMPTS):
            return f"{step} and every instance refuses every prompt, {refused} in a row. {self._newest()}"
        return ""

    def _all_fail(self) -> str:
        """Name the component that has failed every time since the run started."""
        totals, failed = self._interpreter.totals.counts, self._prompt_failures.failed
        many = FAILED_BATCHES * self._config.trainer.batch_size
        if not totals.occupies and failed.count >= many and self._lasts(failed.first_ms):
            what, count, detail = "every group fails in a stage", failed.count, failed.detail
        elif (failing_stage := self._failing_stage()) is not None:
            stage, one = failing_stage
            what = f"every group fails in the stage {stage} at {self._registry.name_of(one.worker)}"
            count, detail = one.failures, one.why
        elif totals.pushes or self._registry.may_return("rollout"):
            return ""
        elif (streak := self._backoff.all_fail()) is not None and self._lasts(streak.first_ms):
            what, count, detail = "rollout workers give up every group", streak.count, streak.detail
        else:
            return ""
        return f"{what}, {count} so far and none succeeded. The newest: {detail}. More in logs/ of the run directory"

    def _failing_stage(self) -> tuple[str, StageFailing] | None:
        """Return a stage whose workers fail every group, with one of them.

        None if a group of this run ever passed the stages, or a group in flight has passed this one.
        """
        totals = self._interpreter.totals.counts
        passed = totals.occupies or totals.releases.get(ReleaseWhy.FILTERED.value)
        return None if passed else self._loads.all_fail(self._registry.stage_workers(), MIN_FAILING_MS)

    def _lasts(self, first_ms: int) -> bool:
        return self._interpreter.clock.now_ms() - first_ms >= MIN_FAILING_MS

    def _spent(self) -> str:
        """List how the prompts were used up."""
        rows, epochs = self._interpreter.prompts.rows, self._config.prompts.epochs
        totals = self._interpreter.totals.counts
        lost = {"filtered": totals.releases.get("filtered", 0), "surplus": totals.releases.get("surplus", 0)}
        for why, count in totals.drops.items():
            lost[why] = lost.get(why, 0) + count
        counts = self._interpreter.machine.state_counts()
        kept = counts["occupied"] + counts["sealed"] + counts["consumed"]
        lost["given up after they failed"] = max(epochs * rows - kept - sum(lost.values()), 0)
        parts = ", ".join(f"{count} {why}" for why, count in lost.items() if count)
        newest = f" (the newest: {detail})" if (detail := self._backoff.newest_given_up) else ""
        return f": {epochs} x {rows}" + (f", {parts}" if parts else "") + newest

    def _more(self) -> str:
        """List the settings to change if the prompts do not suffice."""
        step, last = self._interpreter.machine.next_step, self._config.trainer.steps
        submitted = self._config.prompts.submitted
        ways = ["raise prompts.epochs (0 repeats the prompts without end)"]
        ways = ["resume the run and submit more prompts"] if submitted else ways
        if step:
            ways.append(f"lower trainer.steps from {last} to {step}")
        if filter_of(self._config) != "none":
            ways.append('set rollout.filter to "none"')
        return "Possible fixes: " + ", or ".join(ways)

    def _newest(self) -> str:
        detail = self._backoff.newest() or self._prompt_failures.failed.detail
        newest = f"The newest: {detail}. " if detail else ""
        return f"{newest}Correct or leave out such prompts, or give the engine a longer context"

    # --- likely ----------------------------------------------------------------------------------------------

    def likely(self) -> str:
        """Explain what probably prevents groups, and what to change; empty without a clear cause."""
        prompt_failures = self._prompt_failures
        enough = max(FEW_BATCHES * self._config.trainer.batch_size, 16)
        if prompt_failures.filtered.count >= enough:
            name, count = filter_of(self._config), prompt_failures.filtered.count
            return (
                f'the filter "{name}" kept none of the last {count} groups: the samples of each had the same reward; '
                f"easier or harder prompts, a larger rollout.group_size, a higher rollout.temperature, or "
                f'rollout.filter = "none"'
            )
        if prompt_failures.failed.count >= self._config.trainer.batch_size:
            count, detail = prompt_failures.failed.count, prompt_failures.failed.detail
            return f"each of the last {count} groups failed, the newest: {detail}"
        if prompt_failures.given_up.count >= self._config.trainer.batch_size:
            count = prompt_failures.given_up.count
            return f"workers gave up each of the last {count} groups, the newest: {prompt_failures.given_up.detail}"
        return ""
