"""Consequences of an event: drop groups that are too stale, promote spares, seal ready steps, act on overdue groups.

Each rule reads the window only, and the order is fixed: drop, promote, seal, overdue. The rules run until nothing
changes. The loop ends because each round seals a step or gives up a group.
"""

from itertools import islice

from staleflow.protocols.consistency.batches import Batch, digest
from staleflow.protocols.consistency.bucket import Bucket
from staleflow.protocols.consistency.effects import DropWhy, Promoted, ReleaseWhy, Sealed, Truncate
from staleflow.protocols.consistency.groups import LEASED, OCCUPIED, Group
from staleflow.protocols.consistency.ids import BatchId
from staleflow.protocols.consistency.ledger import STEP_ROWS, Ledger
from staleflow.protocols.consistency.limits import OnOverdue


def settle(ledger: Ledger, now_ms: int) -> None:
    """Apply the rules until nothing changes."""
    window = ledger.window
    while True:
        if ledger.stale_at:
            _drop_stale(ledger)
        if window.spares_occupied:
            _promote(ledger)
        if not ledger.trainer_term or window.occupied + window.claimed < window.batch_size:
            return
        if window.ahead <= 1 and window.ready():
            seal(ledger, _next_members(ledger))
        elif window.ahead or not _overdue(ledger, now_ms):
            return


def seal(ledger: Ledger, groups: tuple[Group, ...]) -> None:
    """Fix the batch of step s. The caller has already removed the groups from the window."""
    window = ledger.window
    step = window.step
    ledger.seal(groups, step)
    members = tuple([group.member() for group in groups])
    ledger.batch_hi = BatchId(ledger.batch_hi + 1)
    below = step - window.max_staleness
    sealed = Sealed(
        batch=ledger.batch_hi,
        lineage=ledger.lineages.current,
        step=step,
        trainer_term=ledger.trainer_term,
        members=members,
        tokens=sum([group.tokens for group in groups]),
        masked_tokens=sum([group.masked(below) for group in groups]) if window.token_bound else 0,
        digest=digest(members),
    )
    ledger.batches[step] = Batch(sealed, groups)
    ledger.dirty[STEP_ROWS + step] = None
    ledger.out.append(sealed)
    for spare in window.late_spares():
        if spare.state is OCCUPIED:
            ledger.drop(spare, DropWhy.SURPLUS)
        else:
            ledger.release(spare, ReleaseWhy.SURPLUS)
    window.advance()


def _next_members(ledger: Ledger) -> tuple[Group, ...]:
    """Remove the next batch from the window: claimed groups in the order of their claims, then earliest deadlines."""
    window = ledger.window
    for group in ledger.claims:
        window.leave(group)
    return (*ledger.claims, *window.take_earliest(window.batch_size - len(ledger.claims)))


def _drop_stale(ledger: Ledger) -> None:
    """Drop every occupied group whose trainable share at step s is below ``min_trainable`` (token bound)."""
    step = ledger.window.step
    for due in sorted(step_ for step_ in ledger.stale_at if step_ <= step):
        for group in ledger.stale_at.pop(due):
            if group.state is OCCUPIED:
                ledger.drop(group, DropWhy.OVERDUE)


def _promote(ledger: Ledger) -> None:
    """Give each occupied spare a counted place: a free one, or that of a leased group that is due no later."""
    window = ledger.window
    for deadline in window.deadlines():
        bucket = window.buckets.get(deadline)
        while bucket is not None and (spare := bucket.first_spare()) is not None:
            demoted = None
            if not window.slack(deadline):
                demoted = _replaceable(ledger, deadline)
                if demoted is None:
                    break
                ledger.set_role(demoted, spare=True)
            ledger.set_role(spare, spare=False)
            ledger.out.append(Promoted(group=spare.id, demoted=None if demoted is None else demoted.id))


def _replaceable(ledger: Ledger, deadline: int) -> Group | None:
    """Return the counted leased group that would pin first, among those due no later than ``deadline``."""
    for d in ledger.window.deadlines():
        if d > deadline:
            return None
        bucket = ledger.window.buckets.get(d)
        if bucket is not None and bucket.leased:
            return bucket.newest_leased()
    return None


def _overdue(ledger: Ledger, now_ms: int) -> bool:
    """Act on the groups that pin the step the trainer waits for. Return True if that freed a place."""
    match ledger.limits.on_overdue:
        case OnOverdue.WAIT:
            return False
        case OnOverdue.TRUNCATE:
            for bucket, count in ledger.window.pinning():
                _truncate(ledger, bucket, count)
            return False
        case OnOverdue.RETRY:
            return _retry(ledger, now_ms)
        case OnOverdue.DROP:
            pinning = _pinning(ledger)
            for group in pinning:
                ledger.release(group, ReleaseWhy.OVERDUE)
            return bool(pinning)


def _pinning(ledger: Ledger) -> list[Group]:
    return [group for bucket, count in ledger.window.pinning() for group in islice(bucket.unfinished(), count)]


def _truncate(ledger: Ledger, bucket: Bucket, count: int) -> None:
    """Emit ``Truncate`` for each of the ``count`` pinning groups of a bucket, once for each lease."""
    if bucket.truncating >= count:
        return
    for group in islice(bucket.unfinished(), count):
        if group.state is LEASED and not group.truncating:
            group.truncating = True
            bucket.truncating += 1
            ledger.out.append(Truncate(group=group.id, lease=group.lease, worker=group.worker))


def _retry(ledger: Ledger, now_ms: int) -> bool:
    """Re-lease each pinning group of an older version at the newest one.

    A worker that has not renewed under its lease gets no new one, because the new lease would restart its term. The
    group is released and goes to another worker.
    """
    newest = ledger.window.version
    acted = False
    for bucket, count in ledger.window.pinning():
        for group in list(islice(bucket.unfinished(), count)):
            if group.version < newest:
                renewed = ledger.leases.renewed_since_grant(group)
                ledger.release(group, ReleaseWhy.OVERDUE)
                if renewed:
                    ledger.reserve(group.id, group.worker, newest, False, now_ms)
                acted = True
    return acted


def pins(ledger: Ledger) -> tuple[Group, ...]:
    """Return the unfinished groups that keep step s from being sealed, earliest deadline first, then newest lease."""
    return tuple(_pinning(ledger))
