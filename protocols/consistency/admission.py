"""Who may start what: reserve and migrate, and the ends of leases that nobody waits for any more."""

from staleflow.protocols.consistency.effects import Code, ReleaseWhy
from staleflow.protocols.consistency.events import Detach, Migrate, Reserve
from staleflow.protocols.consistency.groups import LEASED, RELEASED
from staleflow.protocols.consistency.ids import Version
from staleflow.protocols.consistency.ledger import STEP_ROWS, Ledger
from staleflow.protocols.consistency.production import forget


def room(ledger: Ledger, version: Version) -> int:
    """How many groups could be leased at ``version`` now, as counted groups and then as spares."""
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
    held = ledger.groups.get(id)
    if held is not None and held.state is not RELEASED:
        if not held.live:
            raise ledger.illegal(f"reserve of group {id}, which is {held.state.name}", id)
        same = held.state is LEASED and held.worker == worker and held.version == version
        code = Code.DUPLICATE if same else Code.CONFLICT
        return ledger.refuse("reserve", code, f"held by {held.worker}", worker=worker, group=id, lease=held.lease)
    if id in ledger.retired or not 0 <= id < STEP_ROWS:
        raise ledger.illegal(f"reserve of group {id}, whose id is retired or out of range", id)
    deadline = window.deadline(version)
    counted = window.slack(deadline) > 0
    if not counted and not window.spare_slack(deadline):
        return ledger.refuse("reserve", Code.BUSY, f"no room at version {version}", worker=worker, group=id)
    ledger.reserve(id, worker, version, not counted, now_ms)
    return None


def migrate(ledger: Ledger, event: Migrate, now_ms: int) -> None:
    """Release and reserve in one step: the place in the window is kept, the lease is new."""
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
    ledger.leases.leave(event.worker)


def tick(ledger: Ledger, now_ms: int) -> None:
    forget(ledger)
    for group in ledger.leases.expired(now_ms):
        ledger.release(group, ReleaseWhy.EXPIRED)
