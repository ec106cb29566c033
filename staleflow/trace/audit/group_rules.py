"""Rules over the life of a group: reserve, promote, push, occupy, release, drop, claim."""

from msgspec import UNSET

from staleflow.protocols.consistency.effects import DropWhy, ReleaseWhy
from staleflow.trace import events as ev
from staleflow.trace.audit.state import Books, Group, Rule, State

_RETIRING = (ReleaseWhy.FILTERED, ReleaseWhy.SURPLUS)


def reserve(books: Books, e: ev.Reserve) -> None:
    books.reserves += 1
    for rule in (Rule.I4, Rule.MOVE, Rule.VERSION):
        books.count(rule)
    if e.lease <= books.lease_hi:
        books.fail(Rule.I4, f"lease {e.lease} after lease {books.lease_hi}")
    books.lease_hi = max(books.lease_hi, e.lease)
    existing = books.groups.get(e.group)
    if existing is not None:
        books.fail(Rule.MOVE, f"group {e.group} is reserved while {existing.state.name}")
        books.leave(e.group, existing, permanently=False)
    elif e.group in books.gone:
        books.fail(Rule.MOVE, f"group {e.group} is reserved again though its id is spent")
    if e.version < 0 or not books.survives(e.lineage, e.version):
        books.fail(Rule.VERSION, f"version {e.version} of lineage {e.lineage} is not published or was abandoned")
    deadline = None if books.token_bound else e.version + books.max_staleness
    if e.deadline != deadline:
        books.fail(Rule.VERSION, f"deadline {e.deadline} of version {e.version}, not {deadline}")
    books.enter(e.group, Group(e))
    if books.token_bound:
        live, room = books.due.total() + len(books.claimed), books.version + books.max_staleness - books.step + 1
        books.expect(Rule.I2, e.spare or live <= books.batch_size * room, f"{live} live groups, room {room} batches")


def promote(books: Books, e: ev.Promote) -> None:
    promoted = books.groups.get(e.group)
    ok = promoted is not None and promoted.spare and promoted.state is State.OCCUPIED
    books.expect(Rule.MOVE, ok, f"group {e.group} is promoted, but it is no occupied spare")
    if promoted is not None:
        books.set_spare(promoted, spare=False)
    if e.demoted is UNSET:
        return
    demoted = books.groups.get(e.demoted)
    ok = demoted is not None and not demoted.spare and demoted.state is State.LEASED
    ok = ok and (promoted is None or demoted is None or demoted.deadline <= promoted.deadline)
    books.expect(Rule.MOVE, ok, f"group {e.demoted} is demoted, but it is no leased group that is due no later")
    if demoted is not None:
        books.set_spare(demoted, spare=True)


def push(books: Books, e: ev.Push) -> None:
    for rule in (Rule.MOVE, Rule.I4, Rule.VERSION):
        books.count(rule)
    group = books.groups.get(e.group)
    if group is None or group.state is not State.LEASED:
        books.fail(Rule.MOVE, f"push of group {e.group}, which is {_state(group)}")
        return
    if (group.lease, group.worker) != (e.lease, e.worker):
        holder = f"lease {group.lease} of {group.worker}"
        books.fail(Rule.I4, f"push of group {e.group} by lease {e.lease} of {e.worker}; it is held by {holder}")
    for segment in e.segments:
        if segment.version < group.version:
            books.fail(Rule.VERSION, f"group {e.group} of version {group.version} has tokens of {segment.version}")
        if not books.survives(segment.lineage, segment.version):
            what = f"version {segment.version} of lineage {segment.lineage}"
            books.fail(Rule.VERSION, f"group {e.group} has tokens of {what}, which does not survive")
    group.segments, group.sha = e.segments, e.sha
    group.tokens = sum(segment.tokens for segment in e.segments)
    books.move(group, State.PUSHED)


def occupy(books: Books, e: ev.Occupy) -> None:
    books.count(Rule.MOVE)
    books.occupies += 1
    group = books.groups.get(e.group)
    if group is None or group.state is not State.PUSHED:
        books.fail(Rule.MOVE, f"occupy of group {e.group}, which is {_state(group)}")
        return
    books.order_hi += 1
    group.order = books.order_hi
    books.move(group, State.OCCUPIED)


def release(books: Books, e: ev.Release) -> None:
    books.count(Rule.MOVE)
    books.releases += 1
    group = books.groups.get(e.group)
    if group is None or group.state > State.PUSHED:
        books.fail(Rule.MOVE, f"release of group {e.group}, which is {_state(group)}")
        return
    if group.lease != e.lease:
        books.fail(Rule.I4, f"release of lease {e.lease} of group {e.group}, which has lease {group.lease}")
    if e.why is ReleaseWhy.ROLLBACK:
        books.expect(Rule.ROLLBACK, not books.clean(group), f"group {e.group} survives, but was released")
    books.leave(e.group, group, permanently=e.why in _RETIRING)


def drop(books: Books, e: ev.Drop) -> None:
    books.count(Rule.MOVE)
    books.drops += 1
    group = books.groups.get(e.group)
    if group is None or group.state is not State.OCCUPIED:
        books.fail(Rule.MOVE, f"drop of group {e.group}, which is {_state(group)}")
        return
    if e.why is DropWhy.ROLLBACK:
        books.expect(Rule.ROLLBACK, not books.clean(group), f"group {e.group} survives, but was dropped")
    if group.claimed and e.why is DropWhy.QUARANTINE:
        books.unclaim()
    books.leave(e.group, group, permanently=True)


def claim(books: Books, e: ev.Claim) -> None:
    group = books.groups.get(e.group)
    ok = group is not None and group.state is State.OCCUPIED and not group.spare and not group.claimed
    books.expect(Rule.MOVE, ok, f"claim of group {e.group}, which is {_state(group)}")
    right = e.step == books.step and len(books.claimed) < books.batch_size
    books.expect(Rule.MOVE, right, f"claim for step {e.step}, {len(books.claimed)} are claimed for step {books.step}")
    if group is not None and ok:
        books.claim(e.group, group, claimed=True)


def _state(group: Group | None) -> str:
    return "nowhere" if group is None else group.state.name
