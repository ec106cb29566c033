"""Nothing can ever progress: when that is certain, the run ends with the reason; while it is likely, ``why`` says it.

Certain is only what no engine, stage or trainer that is here could change, however long one waited (but for the last,
where nobody would wait longer):

- the step needs groups, none is under way, and there are no prompts left;
- the prompts that are left were all refused by engines that can never serve them;
- every instance has refused everything it was given, and that was a thousand groups or every prompt there is;
- no group of this run ever came as far as this stage, or this environment, should bring it: many failed, for a minute;
- no group ever came through the stages, and each worker of one has failed everything for a minute.
"""

from collections.abc import Callable

from staleflow.configs.algorithm import filter_of
from staleflow.configs.schema import Config
from staleflow.protocols.consistency.effects import ReleaseWhy
from staleflow.protocols.wire.messages import StageFailing
from staleflow.servers.scheduler.instances import Instances
from staleflow.servers.scheduler.interpreter import Interpreter
from staleflow.servers.scheduler.setbacks import Setbacks

MANY_REFUSED = 1_000
"""Different groups refused in a row: more than chance, however many prompts there are."""
MANY_TIMES = 5
"""Times that a prompt is refused before nobody is thought to serve it."""
FAILED_BATCHES, FAILING_MS = 10, 60_000
"""Batches' worth of groups that failed while none ever succeeded, and for how long: what is late is waited for."""
FEW_BATCHES = 4
"""Batches' worth of groups that came to nothing, one after the other, are worth a word."""


class Deadlock:
    """Looks at the ledger, the deck and what came to nothing lately; keeps no state."""

    def __init__(
        self,
        config: Config,
        interpreter: Interpreter,
        instances: Instances,
        setbacks: Setbacks,
        stage_fails: Callable[[int], tuple[str, StageFailing] | None] = lambda for_ms: None,
    ) -> None:
        """``stage_fails``: a stage whose workers have all failed everything for so many ms, with one of them."""
        self._stage_fails = stage_fails
        self._config = config
        self._interpreter = interpreter
        self._instances = instances
        self._setbacks = setbacks

    # --- certain ---------------------------------------------------------------------------------------------

    def certain(self) -> str:
        """Why the next step can never be trained, and what to change; empty while it may be."""
        machine, deck = self._interpreter.machine, self._interpreter.deck
        counts = machine.state_counts()
        if failing := self._all_fail():
            return f"step {machine.next_step} can never be trained: {failing}"
        if not deck.rows or int(machine.next_step) != machine.version or counts["pushed"] or not machine.starved():
            return ""
        need, ready = self._config.trainer.batch_size, counts["occupied"]
        step = f"step {machine.next_step} can never be trained: {ready} of {need} groups are ready"
        left, leased = deck.left(), counts["leased"]
        if not left and not leased:
            return f"{step} and the prompts are used up{self._spent()}. {self._more()}"
        refused = self._setbacks.refused.values()
        only_refused = left == deck.waiting and len(refused) == left + leased
        if only_refused and all(row.count >= MANY_TIMES for row in refused):
            return f"{step} and no engine serves the prompts that are left, {len(refused)}. {self._too_long()}"
        if self._all_refuse():
            count = len(self._setbacks.refused_in_a_row)
            return f"{step} and every instance refuses every prompt, {count} in a row. {self._too_long()}"
        return ""

    def _all_fail(self) -> str:
        """What fails every time, from the beginning on, and how."""
        totals, setbacks = self._interpreter.totals.counts, self._setbacks
        for row, never, what in (
            (setbacks.failed, not totals.occupies, "every group fails in a stage"),
            (setbacks.given_up, not totals.pushes and not setbacks.refused, "rollout workers give up every group"),
        ):
            lasts_ms = self._interpreter.clock.now_ms() - row.first_ms
            if never and row.count >= FAILED_BATCHES * self._config.trainer.batch_size and lasts_ms >= FAILING_MS:
                more = "More in logs/ of the run directory"
                return f"{what}, {row.count} so far and none succeeded. The newest: {row.detail}. {more}"
        passed = totals.occupies or totals.releases.get(ReleaseWhy.FILTERED.value)
        if not passed and (found := self._stage_fails(FAILING_MS)) is not None:
            stage, one = found
            what = f"every group fails in the stage {stage}, {one.failures} in a row at {one.worker} and none succeeded"
            return f"{what}. The newest: {one.why}. More in logs/ of the run directory"
        return ""

    def _spent(self) -> str:
        """Where the prompts went."""
        rows, epochs = self._interpreter.deck.rows, self._config.prompts.epochs
        totals = self._interpreter.totals.counts
        lost = {"filtered": totals.releases.get("filtered", 0), "surplus": totals.releases.get("surplus", 0)}
        for why, count in totals.drops.items():
            lost[why] = lost.get(why, 0) + count
        parts = ", ".join(f"{count} {why}" for why, count in lost.items() if count)
        return f": {epochs} x {rows}" + (f", {parts}" if parts else "")

    def _more(self) -> str:
        """What to change when there are too few prompts."""
        step, last = self._interpreter.machine.next_step, self._config.trainer.steps
        ways = ["raise prompts.epochs (0 goes round for ever)"]
        if step:
            ways.append(f"lower trainer.steps from {last} to {step}")
        if filter_of(self._config) != "none":
            ways.append('set rollout.filter to "none"')
        return "What helps: " + ", or ".join(ways)

    def _too_long(self) -> str:
        row = self._setbacks.refused.get(self._setbacks.newest_refused)
        said = "" if row is None else f"The newest: {row.detail}. "
        return f"{said}Shorten or leave out such prompts, or give the engine a longer context"

    def _all_refuse(self) -> bool:
        setbacks, rows = self._setbacks, self._interpreter.deck.rows
        groups, many = setbacks.refused_in_a_row, min(rows, MANY_REFUSED)
        if len(groups) < many or len({group % rows for group in groups}) < many:
            return False
        instances = [instance.worker for instance in self._instances]
        return bool(instances) and all(worker in setbacks.refusers for worker in instances)

    # --- likely ----------------------------------------------------------------------------------------------

    def likely(self) -> str:
        """What keeps groups from coming, with what to change; empty when nothing stands out."""
        setbacks = self._setbacks
        enough = max(FEW_BATCHES * self._config.trainer.batch_size, 16)
        if setbacks.filtered.count >= enough:
            name, count = filter_of(self._config), setbacks.filtered.count
            return (
                f'the filter "{name}" kept none of the last {count} groups: the samples of each had the same reward; '
                f"easier or harder prompts, a larger rollout.group_size, a higher rollout.temperature, or "
                f'rollout.filter = "none"'
            )
        if setbacks.failed.count >= self._config.trainer.batch_size:
            return f"each of the last {setbacks.failed.count} groups failed, the newest: {setbacks.failed.detail}"
        if setbacks.given_up.count >= self._config.trainer.batch_size:
            count = setbacks.given_up.count
            return f"workers gave up each of the last {count} groups, the newest: {setbacks.given_up.detail}"
        return ""
