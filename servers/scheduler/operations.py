"""Batched operations on groups: each is applied independently, and its result is returned at its index.

Operations are idempotent: one that a shard resends after a lost reply has no second effect and returns the same result.
"""

from typing import assert_never

from staleflow.net.endpoint import Call
from staleflow.net.permissions import Role
from staleflow.protocols.consistency import events
from staleflow.protocols.consistency.effects import Code, Rejected, Released, ReleaseWhy
from staleflow.protocols.consistency.errors import TransitionError
from staleflow.protocols.consistency.groups import State
from staleflow.protocols.consistency.ids import GroupId
from staleflow.protocols.wire.messages import (
    Op,
    Operations,
    RegisterMissing,
    RegisterOccupy,
    RegisterPush,
    RegisterQuarantine,
    RegisterReject,
    RegisterRelease,
    RegisterYield,
    Result,
    Results,
)
from staleflow.protocols.wire.payload_digest import shortened
from staleflow.servers.scheduler.coordination.backoff import Backoff
from staleflow.servers.scheduler.coordination.handoff import Handoffs
from staleflow.servers.scheduler.ledger.pending_replies import PendingReplies
from staleflow.servers.scheduler.ledger.rejects import Rejects
from staleflow.servers.scheduler.prompts.failures import PromptFailures
from staleflow.servers.scheduler.prompts.outcomes import RowOutcomes
from staleflow.servers.scheduler.state import SchedulerState
from staleflow.servers.scheduler.status.step_metrics import StepMetrics
from staleflow.store.disk_errors import trouble

MAX_TOKENS = 1 << 40
"""Maximum tokens of one group, so that the totals of a run fit the 64-bit integers of the store."""
PEERS_WHY = (ReleaseWhy.ABORTED, ReleaseWhy.FILTERED)
"""Release reasons that a peer may send; the others are reserved for the ledger."""
LedgerOp = RegisterPush | RegisterOccupy | RegisterRelease | RegisterQuarantine | RegisterMissing
"""Operations that map to exactly one ledger event."""
_DONE = Result()


class GroupOperations:
    """Applies the operations of shards and rollout workers to the ledger."""

    def __init__(
        self,
        state: SchedulerState,
        replies: PendingReplies,
        rejects: Rejects,
        metrics: StepMetrics,
        prompt_failures: PromptFailures,
        backoff: Backoff,
        outcomes: RowOutcomes,
    ) -> None:
        self._interpreter = state.interpreter
        self._shards = state.config.trajectories.shards
        self._prompt_failures = prompt_failures
        self._backoff = backoff
        self._outcomes = outcomes
        self._handoffs = Handoffs(state.interpreter, state.instances, backoff)
        self._replies = replies
        self._rejects = rejects
        self._metrics = metrics

    def operations(self, call: Call, body: Operations) -> None:
        results = [self._apply_one(call, op) for op in body.ops]
        self._replies.add(call, Results(results=results))

    def _apply_one(self, call: Call, op: Op) -> Result:
        peer = call.peer
        if call.role == Role.ROLLOUT and isinstance(op, RegisterRelease | RegisterYield) and not self._holds(peer, op):
            detail = f"{peer} does not hold lease {op.lease} of group {op.group}"
            return self._reject(peer, op, Code.STALE_LEASE, detail)
        if isinstance(op, RegisterYield):
            return self._handoffs.hand_off(op)
        if isinstance(op, RegisterReject):
            self._rejects.push_refused(peer, op, op.code.value, self._interpreter.clock.now_ms(), count=op.count)
            return _DONE
        if isinstance(op, RegisterPush) and self._interpreter.full:
            self._rejects.push_refused(peer, op, Code.BUSY.value, self._interpreter.clock.now_ms())
            return Result(code=Code.BUSY, detail=f"the scheduler's {trouble(self._interpreter.full)}")
        if reason := self._invalid_reason(op):
            return self._reject(peer, op, Code.MALFORMED, reason)
        if isinstance(op, RegisterMissing) and not self._expects(op):
            detail = f"group {op.group}: the ledger does not expect {shortened(op.sha)} in shard {op.shard}"
            return self._reject(peer, op, Code.STALE, detail)
        return self._apply(peer, op)

    def _apply(self, peer: str, op: LedgerOp) -> Result:
        """Apply an operation that has passed the checks, and return the ledger's result."""
        event = self._event(op)
        try:
            effects = self._interpreter.apply(event)
        except TransitionError as error:
            return self._reject(peer, op, Code.DENIED, str(error))
        if effects and isinstance(refused := effects[0], Rejected):
            self._rejects.refused(peer, refused, self._interpreter.clock.now_ms())
            if refused.code is not Code.DUPLICATE:
                return Result(code=refused.code, detail=refused.detail)
        elif isinstance(op, RegisterPush):
            self._metrics.pushed(op.samples)
            self._interpreter.prompts.lengths.observe(op.group, op.samples, truncated=op.truncated)
        if isinstance(op, RegisterPush) and op.occupies:
            return self._apply(peer, RegisterOccupy(group=op.group, lease=op.lease, reward=op.reward))
        if isinstance(op, RegisterOccupy):
            self._outcomes.scored(op)
        if isinstance(op, RegisterRelease) and effects and isinstance(released := effects[0], Released):
            retired = isinstance(event, events.Release) and event.retire
            self._prompt_failures.released(op, released, self._interpreter.clock.now_ms())
            self._backoff.released(op, released, retired=retired)
            if retired or op.why is ReleaseWhy.FILTERED:
                self._outcomes.retired(op)
            if op.why is ReleaseWhy.ABORTED:
                self._requeue_later(op.group, retired=retired)
        return _DONE

    def _holds(self, worker: str, op: RegisterRelease | RegisterYield) -> bool:
        """Return whether ``worker`` still holds the lease: it may not release a group that is already pushed.

        True also where the ledger itself returns the right result: an unknown, replaced or released lease.
        """
        group_view = self._interpreter.machine.group(op.group)
        if group_view is None or group_view.lease != op.lease or group_view.state is State.RELEASED:
            return True
        return group_view.worker == worker and group_view.state is State.LEASED

    def _expects(self, op: RegisterMissing) -> bool:
        group_view = self._interpreter.machine.group(op.group)
        return group_view is not None and (group_view.shard, group_view.sha) == (op.shard, op.sha)

    def _reject(self, peer: str, op: Op, code: Code, detail: str) -> Result:
        """Record and return a rejection that did not come from the ledger: a failed check or a ``TransitionError``."""
        refused = Rejected(op=type(op).__name__, code=code, group=op.group)
        self._rejects.refused(peer, refused, self._interpreter.clock.now_ms())
        return Result(code=code, detail=detail)

    def _invalid_reason(self, op: Op) -> str:
        """Return why the operation is invalid in every state of the ledger; empty if it is valid."""
        if isinstance(op, RegisterPush) and sum([segment.tokens for segment in op.segments]) > MAX_TOKENS:
            return f"a group has at most {MAX_TOKENS} tokens"
        if isinstance(op, RegisterPush) and not 0 <= op.shard < self._shards:
            return f"shard is {op.shard}; it must be 0 to {self._shards - 1}"
        if isinstance(op, RegisterRelease) and op.why not in PEERS_WHY:
            return f'why is "{op.why}"; it must be {" or ".join(PEERS_WHY)}'
        return ""

    def _requeue_later(self, group: GroupId, *, retired: bool) -> None:
        """Requeue an aborted group behind two batches of fresh groups, then four, and so on; discard it if ``retired``.

        Requeued without a delay, a failing group would be served next every time. At the end of the source, the groups
        with the fewest failures come first.
        """
        prompts, batch_size = self._interpreter.prompts, self._interpreter.limits.batch_size
        prompts.discard(group)
        if not retired:
            prompts.requeue(group, batch_size << min(prompts.tries[group].failures, 20))

    def _event(self, op: LedgerOp) -> events.Event:
        if isinstance(op, RegisterRelease):
            group_view = self._interpreter.machine.group(op.group) if op.why is ReleaseWhy.ABORTED else None
            retire = group_view is not None and group_view.lease == op.lease and self._backoff.exhausts(group_view)
            return events.Release(group=op.group, lease=op.lease, why=op.why, retire=retire)
        return _event(op)


def _event(op: RegisterPush | RegisterOccupy | RegisterQuarantine | RegisterMissing) -> events.Event:
    match op:
        case RegisterPush():
            return events.Push(
                group=op.group,
                lease=op.lease,
                worker=op.worker,
                shard=op.shard,
                sha=op.sha,
                nbytes=op.nbytes,
                truncated=op.truncated,
                segments=tuple(op.segments),
                sequence_tokens=op.sequence_tokens,
            )
        case RegisterOccupy():
            return events.Occupy(group=op.group, lease=op.lease)
        case RegisterQuarantine() | RegisterMissing():
            return events.Quarantine(group=op.group)
        case _:
            assert_never(op)
