"""The life of a group between its lease and its batch: push, occupy, release, drop and quarantine.

The lease number is the fencing token. A request under any other number than the current one is refused with
``stale_lease``. A repeated request is a ``duplicate``; the same key with other bytes is a ``conflict``. A request under
the current number that the group's state cannot allow is a bug of the caller and raises.
"""

from staleflow.protocols.consistency.effects import Code, DropWhy, ReleaseWhy, Unsealed
from staleflow.protocols.consistency.events import Drop, Occupy, Push, Quarantine, Release
from staleflow.protocols.consistency.groups import CONSUMED, LEASED, OCCUPIED, PUSHED, RELEASED, SEALED, Group
from staleflow.protocols.consistency.ids import Step
from staleflow.protocols.consistency.ledger import STEP_ROWS, Ledger

MAX_RETIRED_PER_CALL = 4
"""More than one, so that the number of kept groups shrinks even while groups arrive as fast as they are consumed."""


def push(ledger: Ledger, event: Push) -> None:
    group = ledger.groups.get(event.group)
    if group is None or group.lease != event.lease or group.worker != event.worker or group.state is RELEASED:
        return _refuse_push(ledger, event, Code.STALE_LEASE, "")
    if group.state is not LEASED:
        code = Code.DUPLICATE if group.sha == event.sha else Code.CONFLICT
        return _refuse_push(ledger, event, code, f"group {event.group} was pushed as {group.sha}")
    newest, lineages = ledger.window.version, ledger.lineages
    for segment in event.segments:
        lineage, version, tokens = segment
        if not lineages.survives(lineage, version):
            return _refuse_push(ledger, event, Code.STALE, f"version {version} of lineage {lineage} was abandoned")
        if not group.version <= version <= newest:
            detail = f"a segment of version {version}; the lease allows {group.version} to {newest}"
            return _refuse_push(ledger, event, Code.BAD_VERSION, detail)
        if tokens < 0:
            return _refuse_push(ledger, event, Code.MALFORMED, f"a segment of {tokens} tokens")
    ledger.push(group, event)
    return None


def _refuse_push(ledger: Ledger, event: Push, code: Code, detail: str) -> None:
    ledger.refuse("push", code, detail, worker=event.worker, group=event.group, lease=event.lease)


def occupy(ledger: Ledger, event: Occupy) -> None:
    group = ledger.groups.get(event.group)
    if group is None or group.lease != event.lease or group.state is RELEASED:
        return ledger.refuse("occupy", Code.STALE_LEASE, group=event.group, lease=event.lease)
    if group.state is PUSHED:
        retire_oldest(ledger)
        return ledger.occupy(group)
    if group.state is LEASED:
        raise ledger.illegal(f"occupy of group {event.group}, which is LEASED: its push is missing", event.group)
    return ledger.refuse("occupy", Code.DUPLICATE, group=event.group, lease=event.lease)


def release(ledger: Ledger, event: Release) -> None:
    group = ledger.groups.get(event.group)
    code = Code.STALE_LEASE
    if group is None:
        if event.group in ledger.retired:
            code = Code.DUPLICATE
    elif group.lease == event.lease:
        if group.state <= PUSHED:
            return ledger.release(group, event.why, retire=event.retire)
        code = Code.DUPLICATE if group.state is RELEASED else Code.STALE
    return ledger.refuse("release", code, group=event.group, lease=event.lease)


def drop(ledger: Ledger, event: Drop) -> None:
    group = ledger.groups.get(event.group)
    if group is None and event.group in ledger.retired:
        return ledger.refuse("drop", Code.DUPLICATE, group=event.group)
    if group is None or group.state is not OCCUPIED:
        raise ledger.illegal(f"drop of group {event.group}, which is {_state(group)}", event.group)
    if group.claim >= 0:
        return ledger.refuse("drop", Code.DENIED, "claimed by the next step", group=event.group)
    return ledger.drop(group, event.why)


def quarantine(ledger: Ledger, event: Quarantine) -> None:
    """Remove a group whose payload is corrupt, in whatever state it is."""
    group = ledger.groups.get(event.group)
    if group is None and event.group in ledger.retired:
        return ledger.refuse("quarantine", Code.DUPLICATE, group=event.group)
    if group is None or group.state in (LEASED, RELEASED, CONSUMED):
        return ledger.refuse("quarantine", Code.STALE, f"it is {_state(group)}", group=event.group)
    if group.state is PUSHED:
        return ledger.release(group, ReleaseWhy.ABORTED)
    if group.state is SEALED:
        unseal(ledger, group.step, DropWhy.QUARANTINE)
    elif group.claim >= 0:
        ledger.unclaim()
    return ledger.drop(group, DropWhy.QUARANTINE)


def _state(group: Group | None) -> str:
    return "unknown" if group is None else group.state.name


def unseal(ledger: Ledger, step: Step, why: DropWhy) -> None:
    """Unseal the batch of ``step`` and all later ones. Their groups become occupied again at their old places."""
    ledger.unclaim()
    window = ledger.window
    for later in sorted((s for s, batch in ledger.batches.items() if s >= step and not batch.consumed), reverse=True):
        batch = ledger.batches.pop(later)
        ledger.dirty[STEP_ROWS + later] = None
        ledger.forget_attempts(batch.sealed.batch)
        ledger.out.append(Unsealed(batch=batch.sealed.batch, why=why))
        window.step = later
        for group in batch.groups:
            ledger.reoccupy(group)
            window.enter(group)


def retire_oldest(ledger: Ledger) -> None:
    """Retire a few groups of the oldest batch below the oldest checkpoint, if one exists.

    No rollback can need such a batch. The work is spread over the occupations, so that the number of kept groups is
    bounded and a checkpoint does not stall the ledger.
    """
    step = next(iter(ledger.batches), None)
    if step is None or step >= ledger.floor:
        return
    batch = ledger.batches[step]
    few = batch.groups[batch.forgotten : batch.forgotten + MAX_RETIRED_PER_CALL]
    for group in few:
        ledger.retire(group.id)
    batch.forgotten += len(few)
    if batch.forgotten == len(batch.groups):
        del ledger.batches[step]
        ledger.dirty[STEP_ROWS + step] = None
