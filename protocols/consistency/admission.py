"""Lease handlers: reserve, migrate, and the expiry of leases whose holder left or fell silent."""

from staleflow.protocols.consistency.effects import Code, ReleaseWhy
from staleflow.protocols.consistency.events import Detach, Migrate, Reserve
from staleflow.protocols.consistency.groups import LEASED, RELEASED
from staleflow.protocols.consistency.ids import Version
from staleflow.protocols.consistency.ledger import STEP_ROWS, Ledger
from staleflow.protocols.consistency.production import retire_oldest


def room(ledger: Ledger, version: Version) -> int:
    """Return the number of groups that could be leased at ``version`` now, counted groups and spares together."""
    window = ledger.window
    if not 0 <= version <= window.version:
        return 0
    deadline = window.deadline(version)
    return window.slack(deadline) + window.spare_slack(deadline)


def reserve(ledger: Ledger, event: Reserve, now_ms: int) -> None:
    id, worker, version, window = event.group, event.worker, event.version, ledger.window
    if not 0 <= version <= window.version:
        detail = f"version {version} is not published; the newest is {window.version}"
        return ledger.refuse("reserve", Code.BAD_VERSION, detail, worker=worker, group=id)
    existing = ledger.groups.get(id)
    if existing is not None and existing.state is not RELEASED:
        if not existing.live:
            raise ledger.illegal(f"reserve of group {id}, which is {existing.state.name}", id)
        same = existing.state is LEASED and existing.worker == worker and existing.version == version
        code = Code.DUPLICATE if same else Code.CONFLICT
        detail = f"held by {existing.worker}"
        return ledger.refuse("reserve", code, detail, worker=worker, group=id, lease=existing.lease)
    if id in ledger.retired or not 0 <= id < STEP_ROWS:
        raise ledger.illegal(f"reserve of group {id}, whose id is retired or out of range", id)
    deadline = window.deadline(version)
    counted = window.slack(deadline) > 0
    if not counted and not window.spare_slack(deadline):
        return ledger.refuse("reserve", Code.BUSY, f"no room at version {version}", worker=worker, group=id)
    ledger.reserve(id, worker, version, not counted, now_ms)
    return None


def migrate(ledger: Ledger, event: Migrate, now_ms: int) -> None:
    """Release and reserve atomically. The group keeps its place in the window and gets a new lease."""
    group = ledger.groups.get(event.group)
    if group is None or group.lease != event.lease or group.state is not LEASED:
        return ledger.refuse("migrate", Code.STALE_LEASE, worker=event.to, group=event.group, lease=event.lease)
    if ledger.window.overfull():
        return ledger.refuse("migrate", Code.BUSY, "no room", worker=event.to, group=event.group, lease=event.lease)
    ledger.release(group, ReleaseWhy.ABORTED)
    ledger.reserve(group.id, event.to, group.version, group.spare, now_ms)
    return None


def detach(ledger: Ledger, event: Detach) -> None:
    for group in ledger.leases.of(event.worker):
        ledger.release(group, event.why)
    ledger.leases.forget_renewals(event.worker)


def tick(ledger: Ledger, now_ms: int) -> None:
    retire_oldest(ledger)
    for group in ledger.leases.expired(now_ms):
        ledger.release(group, ReleaseWhy.EXPIRED)
