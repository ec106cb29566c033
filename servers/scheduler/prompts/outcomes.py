"""Outcomes of submitted rows: record each of them, and return a row whose group was lost to the queue.

The ledger drops groups although nothing is wrong with their prompts, for example those that an abandoned version wrote.
The id of a dropped group never returns, so its row returns to the queue under the id of another group.
"""

import math

from staleflow.protocols.consistency.effects import Consumed, Dropped, DropWhy, Released, ReleaseWhy
from staleflow.protocols.consistency.ids import GroupId
from staleflow.protocols.wire.messages import SUBMITTED_ROWS, RegisterOccupy, RegisterRelease, RowResult
from staleflow.servers.scheduler.ledger.interpreter import Interpreter
from staleflow.servers.scheduler.prompts.outcome_log import OutcomeLog
from staleflow.servers.scheduler.status.step_metrics import StepMetrics

MAX_RETURNS = 3
"""Returns after which a row whose group is damaged, untrainable or too old is given up."""
_MAY_BE_AT_FAULT = (DropWhy.QUARANTINE, DropWhy.OVERDUE)


class RowOutcomes:
    """Follows the groups of submitted rows. Does nothing in a run whose prompts come from its configuration."""

    def __init__(self, interpreter: Interpreter, metrics: StepMetrics) -> None:
        self._interpreter = interpreter
        self._metrics = metrics
        self._log: OutcomeLog | None = interpreter.prompts.outcomes
        if self._log is not None:
            interpreter.listen(Consumed, self._consumed)
            interpreter.listen(Released, self._released)
            interpreter.listen(Dropped, self._dropped)

    def scored(self, op: RegisterOccupy | RegisterRelease) -> None:
        """Note the mean reward of a group that a shard occupied or released."""
        rows, row = self._interpreter.prompts.submissions, op.group % SUBMITTED_ROWS
        if rows is None or self._log is None or op.reward is None or not math.isfinite(op.reward):
            return
        if row in rows:  # else a late duplicate: the row is over, and its reward was deleted with it
            self._log.score(row, op.reward)

    def retired(self, op: RegisterRelease) -> None:
        """Record the outcome of a group that was filtered or given up."""
        if self._log is not None:
            self.scored(op)
            filtered = op.why is ReleaseWhy.FILTERED
            self._log.add(op.group, RowResult.FILTERED if filtered else RowResult.GIVEN_UP)

    def _consumed(self, effect: Consumed) -> None:
        assert self._log is not None
        for group in self._metrics.members(effect.batch):
            self._log.add(group, RowResult.TRAINED, effect.step)

    def _released(self, effect: Released) -> None:
        if effect.why is ReleaseWhy.SURPLUS:
            self._return(effect.group)

    def _dropped(self, effect: Dropped) -> None:
        assert self._log is not None
        if effect.why in _MAY_BE_AT_FAULT and effect.group // SUBMITTED_ROWS >= MAX_RETURNS:
            self._log.add(effect.group, RowResult.GIVEN_UP)
        else:
            self._return(effect.group)

    def _return(self, group: GroupId) -> None:
        self._interpreter.prompts.requeue(GroupId(group + SUBMITTED_ROWS))
