"""Rules over steps and versions: publish, join, rollback, seal, deliver, consume, checkpoint; open and close."""

from collections.abc import Sequence

from staleflow.trace import events as ev
from staleflow.trace.audit.state import Batch, Books, Group, Rule, State


def opened(books: Books, e: ev.Open) -> None:
    settings = books.settings
    if settings is not None:
        same = (e.max_staleness, e.batch_size, e.bound) == (settings.max_staleness, settings.batch_size, settings.bound)
        books.expect(Rule.RECOVERY, same, "the bound or the batch size changed inside the run")
    books.settings = e
    stored, states = e.recovered, books.states
    have = (states[State.LEASED] + states[State.PUSHED], states[State.OCCUPIED], states[State.SEALED])
    recovered = (stored.reserved, stored.occupied, stored.sealed)
    books.expect(Rule.RECOVERY, recovered == have, f"recovered {recovered}, the trace has {have}")
    where = (stored.lineage, stored.version)
    at = (books.lineage, books.version)
    books.expect(Rule.RECOVERY, where == at, f"recovered lineage and version {where}, the trace has {at}")


def closed(books: Books, e: ev.Close) -> None:
    states = books.states
    have = (states[State.LEASED] + states[State.PUSHED], states[State.OCCUPIED])
    left = (e.reserved, e.occupied)
    books.expect(Rule.RECOVERY, left == have, f"closes with {left} reserved and occupied, the trace has {have}")


def fence(books: Books, term: int, what: str) -> None:
    """Check that a trainer's action comes from the newest term."""
    books.expect(Rule.FENCE, term == books.term and term > 0, f"{what} under term {term}; {books.term} is current")


def publish(books: Books, e: ev.Publish) -> None:
    fence(books, e.trainer_term, f"publish of {e.version}")
    dense = e.lineage == books.lineage and e.version == books.version + 1
    if e.version == 0:
        dense = books.version == -1 and e.lineage == books.lineage
    books.expect(Rule.I5, dense, f"version {e.version} of lineage {e.lineage} after {books.version}")
    once = (e.lineage, e.version) not in books.published
    books.expect(Rule.I5, once, f"version {e.version} of lineage {e.lineage} is published twice")
    books.published[(e.lineage, e.version)] = e.sha
    books.version = e.version


def pull(books: Books, e: ev.Pull) -> None:
    sha = books.published.get((e.lineage, e.version))
    if not e.ok:  # the bytes did not arrive, or were not loaded
        books.expect(Rule.PULL, sha is not None, f"{e.worker} pulled version {e.version}, which was never published")
    else:
        books.expect(Rule.PULL, sha == e.sha, f"{e.worker} loaded {e.sha} as version {e.version}, published was {sha}")


def join(books: Books, e: ev.Join) -> None:
    books.expect(Rule.FENCE, e.trainer_term > books.term, f"term {e.trainer_term} after {books.term}")
    books.term = max(books.term, e.trainer_term)


def rollback(books: Books, e: ev.Rollback) -> Batch | None:
    """Roll back to a version; return the batch that must be sealed again, if any."""
    target = e.to_version
    raised = (e.from_lineage, e.lineage) == (books.lineage, books.lineage + 1)
    books.expect(Rule.ROLLBACK, raised, f"lineage {e.from_lineage} -> {e.lineage} while {books.lineage} is current")
    possible = books.kept <= target <= books.version
    books.expect(Rule.ROLLBACK, possible, f"to version {target}; {books.kept} to {books.version} are possible")
    fence(books, e.trainer_term, "rollback")
    if e.from_lineage < e.lineage:  # else already reported, and a cycle of forks would make survives() loop without end
        books.forks[e.lineage] = (e.from_lineage, target)
    books.lineage, books.version, books.step = e.lineage, target, target
    books.unclaim()
    replay = next((batch for batch in books.batches.values() if batch.step == target), None)
    for number in [number for number, batch in books.batches.items() if batch.step >= target]:
        batch = books.batches.pop(number)
        for id in batch.members:
            if (group := books.groups.get(id)) is None:  # already reported at its seal: the group was never leased
                continue
            books.set_spare(group, spare=False)
            books.move(group, State.OCCUPIED)
    return replay


def rolled_back(books: Books) -> None:
    """Check that no group of the abandoned future is left after the transaction of a rollback."""
    left = [id for id, group in books.groups.items() if group.state <= State.OCCUPIED and not books.clean(group)]
    books.expect(Rule.ROLLBACK, not left, f"{len(left)} groups of the abandoned future survive, group {left[:1]} first")


def seal(books: Books, e: ev.Seal) -> None:
    fence(books, e.trainer_term, f"seal of step {e.step}")
    next_one = e.step == books.step and e.lineage == books.lineage and e.step <= books.version + 1
    books.expect(Rule.MOVE, next_one, f"seal of step {e.step}; {books.step} is next, version {books.version} is out")
    ids = [member.group for member in e.members]
    books.expect(Rule.I3, len(set(ids)) == len(ids) == books.batch_size, f"{len(set(ids))} groups in batch {e.batch}")
    books.expect(Rule.I3, e.batch > books.batch_hi, f"batch {e.batch} after batch {books.batch_hi}")
    books.batch_hi = max(books.batch_hi, e.batch)
    if not books.replaying:
        _order(books, ids)
    masked = tokens = 0
    for member in e.members:
        group = _member(books, e, member)
        if group is not None:
            tokens += group.tokens
            masked += group.masked(e.step - books.max_staleness)
            group.claimed = False
    if len(books.claimed):
        books.claimed.clear()
    books.expect(Rule.I1, (tokens, masked) == (e.tokens, e.masked_tokens), _differ(e, tokens, masked))
    books.batches[e.batch] = Batch(e)
    books.step = e.step + 1


def _differ(e: ev.Seal, tokens: int, masked: int) -> str:
    return f"{e.masked_tokens} of {e.tokens} tokens are masked; the members have {masked} too old of {tokens}"


def _member(books: Books, e: ev.Seal, member: ev.MemberOf) -> Group | None:
    """Check one member and seal it."""
    for rule in (Rule.MOVE, Rule.I1, Rule.I3):
        books.count(rule)
    group = books.groups.get(member.group)
    if group is None or group.state is not State.OCCUPIED or group.spare:
        what = "nowhere" if group is None else f"{'a spare, ' if group.spare else ''}{group.state.name}"
        books.fail(Rule.MOVE, f"group {member.group} is sealed, but it is {what}")
        return None
    member_facts = (member.lease, member.lineage, member.version, member.sha)
    if member_facts != (group.lease, group.lineage, group.version, group.sha):
        books.fail(Rule.I3, f"member {member.group} differs from its push")
    oldest = e.step - books.max_staleness
    if not books.token_bound and group.version < oldest:
        books.fail(Rule.I1, f"group {member.group} of version {group.version} in step {e.step}")
    if books.token_bound and books.settings is not None:
        fresh = group.tokens - group.masked(oldest)
        if fresh < books.settings.min_trainable * group.tokens:
            books.fail(Rule.I1, f"group {member.group} has {fresh} trainable of {group.tokens} tokens")
    if not books.clean(group):
        books.fail(Rule.ROLLBACK, f"group {member.group} of an abandoned version is sealed")
    books.move(group, State.SEALED)
    return group


def _order(books: Books, ids: Sequence[int]) -> None:
    """Check that the claimed groups come first, then the earliest by (deadline, occupation)."""
    books.count(Rule.ORDER)
    groups = books.groups
    if ids[: len(books.claimed)] != books.claimed:
        books.fail(Rule.ORDER, "the claimed groups are not the first of the batch")
    chosen = [(g.deadline, g.order) for id in ids if (g := groups.get(id)) is not None and not g.claimed]
    if chosen != sorted(chosen):
        books.fail(Rule.ORDER, "the members are not in order of deadline and occupation")
    waiting = books.due_occupied.total() - len(chosen)
    if waiting > 0 and chosen:
        members = set(ids)
        for id, g in groups.items():
            if g.state is not State.OCCUPIED or g.spare or g.claimed or id in members:
                continue
            if (g.deadline, g.order) < chosen[-1]:
                books.fail(Rule.ORDER, f"group {id} is due before the last member, but was left out")
                return


def unseal(books: Books, e: ev.Unseal) -> None:
    batch = books.batches.get(e.batch)
    ok = batch is not None and not batch.consumed
    books.expect(Rule.MOVE, ok, f"unseal of batch {e.batch}, which is not sealed")
    books.unclaim()
    if batch is None or not ok:
        return
    for number in [number for number, other in books.batches.items() if other.step >= batch.step]:
        for id in books.batches.pop(number).members:
            if (group := books.groups.get(id)) is not None:
                books.move(group, State.OCCUPIED)
    books.step = batch.step


def deliver(books: Books, e: ev.Deliver) -> None:
    fence(books, e.trainer_term, f"delivery of batch {e.batch}")
    batch = books.batches.get(e.batch)
    ok = batch is not None and not batch.consumed and batch.step == e.step
    books.expect(Rule.DELIVERY, ok, f"delivery of batch {e.batch}, which is not sealed")
    if batch is not None:
        last = batch.attempts[e.rank]
        books.expect(Rule.DELIVERY, e.attempt == last + 1, f"attempt {e.attempt} after {last} at rank {e.rank}")
        batch.attempts[e.rank] = e.attempt


def consume(books: Books, e: ev.Consume) -> None:
    fence(books, e.trainer_term, f"consume of step {e.step}")
    batch = books.batches.get(e.batch)
    ok = batch is not None and not batch.consumed and batch.step == e.step
    books.expect(Rule.I3, ok, f"consume of batch {e.batch}, which is not the sealed batch of step {e.step}")
    inside = e.step == books.version and e.lineage == books.lineage
    books.expect(Rule.I5, inside, f"consume of step {e.step} at version {books.version}")
    if batch is None or not ok:
        return
    batch.consumed = True
    for id in batch.members:
        books.count(Rule.I3)
        group = books.groups.get(id)
        if group is None or group.state is not State.SEALED:
            books.fail(Rule.I3, f"group {id} is consumed, but it is not sealed")
        else:
            books.move(group, State.CONSUMED)


def checkpoint(books: Books, e: ev.CheckpointKept) -> None:
    fence(books, e.trainer_term, f"checkpoint of {e.version}")
    ok = books.kept <= e.version <= books.version and books.survives(e.lineage, e.version)
    books.expect(Rule.ROLLBACK, ok, f"checkpoint of version {e.version} of lineage {e.lineage}")
    books.kept = max(books.kept, e.version)
    for number in [n for n, batch in books.batches.items() if batch.consumed and batch.step < books.kept]:
        for id in books.batches.pop(number).members:
            group = books.groups.get(id)
            if group is not None:
                books.leave(id, group, permanently=True)
                books.consumed_total += 1
