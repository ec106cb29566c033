"""Checks of I1 to I6 of docs/consistency.md, recounted from the groups alone.

A check is a full pass over the ledger, for debug mode and tests. I4 (only the current lease pushes) and the single
publication of I5 constrain events: the handlers keep them and the audit proves them on the trace. This module checks
the part that a state can show.
"""

from collections import Counter

from staleflow.protocols.consistency.errors import InvariantError
from staleflow.protocols.consistency.groups import NO_STEP, Group, State
from staleflow.protocols.consistency.ids import Step
from staleflow.protocols.consistency.ledger import Ledger


def check(ledger: Ledger) -> None:
    """Raise ``InvariantError`` when the ledger contradicts itself."""
    for rule in (_i1, _i2, _i3, _i4, _i5, _i6, _lineage, _counters, _at_rest):
        rule(ledger)


def _require(holds: bool, ledger: Ledger, message: str, group: Group | None = None) -> None:
    if not holds:
        story = ledger.story.of(group.id) if ledger.story is not None and group is not None else ()
        raise InvariantError(message, story)


def _i1(ledger: Ledger) -> None:
    """The bound in batch k: under the trajectory bound no group is older than k - max_staleness, and under either bound
    the batch counts its tokens older than that as masked."""
    eta = ledger.limits.max_staleness
    for step, batch in ledger.batches.items():
        masked = 0
        for group in batch.left():
            if not ledger.window.token_bound:
                _require(group.version >= step - eta, ledger, f"I1: version {group.version} in step {step}", group)
            masked += sum(segment.tokens for segment in group.segments if segment.version < step - eta)
            oldest = min((segment.version for segment in group.segments), default=group.version)
            _require(oldest >= group.version, ledger, "I1: a segment is older than its group", group)
        whole = step >= ledger.floor
        _require(not whole or masked == batch.sealed.masked_tokens, ledger, f"I1: {masked} tokens in {step} are old")


def _i2(ledger: Ledger) -> None:
    """Hall's condition for every deadline (trajectory bound), with claimed groups counted at their deadline, then at
    step s."""
    window = ledger.window
    if window.token_bound:
        return
    counted = [group for group in ledger.groups.values() if group.live and not group.spare]
    due = Counter(group.deadline for group in counted)
    free = Counter(group.deadline for group in counted if group.claim < 0)
    total, unclaimed = 0, len(ledger.claims)
    for d in sorted(due):
        total, unclaimed = total + due[d], unclaimed + free[d]
        room = ledger.limits.batch_size * (d - window.step + 1)
        _require(total <= room, ledger, f"I2: {total} groups are due by step {d}, {room} fit")
        _require(unclaimed <= room, ledger, f"I2: {unclaimed} groups and claims are due by step {d}, {room} fit")


def _i3(ledger: Ledger) -> None:
    """A batch has exactly B distinct groups, and a group is in one batch at most."""
    batched: set[int] = set()
    for step, batch in ledger.batches.items():
        ids = {group.id for group in batch.left()}
        due = ledger.limits.batch_size if step >= ledger.floor else len(ids)
        _require(len(batch.left()) == len(ids) == due, ledger, f"I3: {len(ids)} in step {step}")
        _require(not batched & ids, ledger, f"I3: a group of step {step} is in two batches")
        batched |= ids
        state = State.CONSUMED if batch.consumed else State.SEALED
        for group in batch.left():
            current = ledger.groups.get(group.id) is group
            in_step = group.state is state and group.step == step
            _require(current and in_step, ledger, "I3: a member is elsewhere", group)


def _i4(ledger: Ledger) -> None:
    """One lease a group, none above the highest granted, and the holders have exactly the leased groups."""
    leases = [group.lease for holder in ledger.leases.holders.values() for group in holder.leases.values()]
    leased = {group.lease for group in ledger.groups.values() if group.state is State.LEASED}
    _require(len(leases) == len(leased) and set(leases) == leased, ledger, "I4: held leases are not the leased groups")
    for group in ledger.groups.values():
        _require(group.lease <= ledger.lease_hi, ledger, "I4: a lease that was never granted", group)
        _require(group.id not in ledger.retired, ledger, "I4: a retired id is in use", group)


def _i5(ledger: Ledger) -> None:
    """Versions are dense: v steps are consumed, s - v are sealed, no batch since the oldest checkpoint is missing."""
    window, checkpoints = ledger.window, ledger.checkpoints
    ascending = checkpoints == sorted(set(checkpoints)) and checkpoints[0] >= 0
    _require(ascending and checkpoints[-1] <= max(window.version, 0), ledger, f"I5: checkpoints {checkpoints}")
    _require(max(window.version, 0) <= window.step <= window.version + 2, ledger, f"I5: s {window.step}")
    for step in range(ledger.floor, window.step):
        batch = ledger.batches.get(Step(step))
        _require(batch is not None and batch.consumed == (step < window.version), ledger, f"I5: step {step}")


def _i6(ledger: Ledger) -> None:
    """No group is lost: every reserve and every occupy is accounted for."""
    counts = ledger.counts
    in_work = counts[State.LEASED] + counts[State.PUSHED]
    finished = counts[State.OCCUPIED] + counts[State.SEALED] + counts[State.CONSUMED]
    _require(ledger.reserves == ledger.releases + ledger.occupies + in_work, ledger, "I6: reserves do not add up")
    _require(ledger.occupies == ledger.drops + finished, ledger, "I6: occupies do not add up")


def _lineage(ledger: Ledger) -> None:
    """Every token of a live or sealed group was written by a surviving, published version."""
    for group in ledger.groups.values():
        if group.state <= State.SEALED:
            names = [(segment.lineage, segment.version) for segment in group.segments]
            for lineage, version in [(group.lineage, group.version), *names]:
                alive = version <= ledger.window.version and ledger.lineages.survives(lineage, version)
                _require(alive, ledger, f"lineage: version {version} of lineage {lineage} was abandoned", group)


def _counters(ledger: Ledger) -> None:
    """Every counter equals a recount."""
    window = ledger.window
    groups = ledger.groups.values()
    states = Counter(group.state for group in groups)
    for state in (State.LEASED, State.PUSHED, State.OCCUPIED, State.SEALED):
        _require(states[state] == ledger.counts[state], ledger, f"count of {state.name} is {ledger.counts[state]}")
    live = [group for group in groups if group.live]
    spares = [group for group in live if group.spare]
    claimed = [group for group in live if group.claim >= 0]
    occupied_spares = sum(group.state is State.OCCUPIED for group in spares)
    _require((len(spares), occupied_spares) == (window.num_spares, window.spares_occupied), ledger, "spares")
    _require(len(claimed) == window.claimed == len(ledger.claims), ledger, "claims")
    free = Counter((group.deadline, group.state) for group in live if not group.spare and group.claim < 0)
    _require(sum(free.values()) == window.counted, ledger, "counted")
    for d, bucket in window.buckets.items():
        stored = (bucket.leased, bucket.pushed, bucket.occupied)
        recount = (free[d, State.LEASED], free[d, State.PUSHED], free[d, State.OCCUPIED])
        _require(stored == recount, ledger, f"bucket {d} is {stored}, not {recount}")
        truncating = sum(g.truncating for g in live if g.deadline == d and g.state is State.LEASED and not g.spare)
        _require(
            truncating == bucket.truncating, ledger, f"bucket {d}: truncating {bucket.truncating}, not {truncating}"
        )
    _require(all(group.step == NO_STEP for group in live), ledger, "a live group is in a step")


def _at_rest(ledger: Ledger) -> None:
    """No step that could be sealed is unsealed, no spare is late, and no occupied spare has a free counted place."""
    window = ledger.window
    ready = window.step <= window.version + 1 and window.ready()
    _require(not (ledger.trainer_term and ready), ledger, f"step {window.step} is ready and not sealed")
    for group in ledger.groups.values():
        if group.live and group.spare:
            _require(window.token_bound or group.deadline >= window.step, ledger, "a late spare", group)
            if group.state is State.OCCUPIED:
                _require(window.slack(group.deadline) == 0, ledger, "a spare that has room", group)
