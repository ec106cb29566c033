"""Rollback to an older checkpoint ``k``: undo all steps from ``k`` and keep everything else.

Sealed and consumed groups of steps >= k become occupied again in their old order. Groups with tokens of a version > k
are given up. Batch k, if it was ever sealed, is sealed again with the same groups in the same order.
"""

from staleflow.protocols.consistency.effects import DropWhy, ReleaseWhy, RolledBack
from staleflow.protocols.consistency.groups import NO_CLAIM, Group, State
from staleflow.protocols.consistency.ids import BatchId, Step, Version
from staleflow.protocols.consistency.ledger import STEP_ROWS, Ledger
from staleflow.protocols.consistency.settle import seal


def roll_back(ledger: Ledger, to: Version) -> None:
    """Go back to version ``to``. The trainer has already joined and its term is the current one."""
    lineage_before = ledger.lineages.current
    lineage = ledger.lineages.fork(to)
    ledger.out.append(
        RolledBack(lineage=lineage, from_lineage=lineage_before, to_version=to, trainer_term=ledger.trainer_term)
    )
    ledger.checkpoints = [version for version in ledger.checkpoints if version <= to]
    replay = ledger.batches.get(Step(to))
    _undo_batches(ledger, to)
    window = ledger.window
    window.version = to
    window.step = Step(to)
    window.clear()
    ledger.newest_sha = ""
    ledger.consumed_batch = BatchId(0)
    resealed = replay.groups if replay is not None else ()
    live = {group.lease: group for group in ledger.groups.values() if group.live}
    # Only tokens of versions <= k went into batch k, so its groups survive and are sealed without passing the window.
    for group in resealed:
        del live[group.lease]
    # In lease order, because the order of the effects must not depend on the order of the dictionary.
    for lease in sorted(live):
        _judge(ledger, live[lease], to)
    if resealed:
        seal(ledger, resealed)


def _undo_batches(ledger: Ledger, to: Version) -> None:
    for group in ledger.claims:
        group.claim = NO_CLAIM
        ledger.dirty[group.id] = None
    ledger.claims.clear()
    ledger.attempts.clear()
    for step in sorted(s for s in ledger.batches if s >= to):
        batch = ledger.batches.pop(step)
        ledger.dirty[STEP_ROWS + step] = None
        for group in batch.groups:
            ledger.reoccupy(group)


def _judge(ledger: Ledger, group: Group, to: Version) -> None:
    """Keep a live group, or give it up if an abandoned version wrote any of its tokens."""
    if max(group.version, group.newest()) <= to:
        ledger.window.enter(group)
    elif group.state is State.OCCUPIED:
        ledger.drop(group, DropWhy.ROLLBACK, rebuilding=True)
    else:
        ledger.release(group, ReleaseWhy.ROLLBACK, rebuilding=True)
