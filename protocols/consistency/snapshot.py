"""The ledger as rows for a store: one a group, one a batch, one a page of retired ids, and one of globals.

Rows are flat tuples of integers, strings and booleans, so that any codec preserves them. Each row restores its object
on its own; the counters of the window, the queues and the leases are rebuilt from the rows.
"""

from collections.abc import Iterable, Sequence

from staleflow.protocols.consistency.batches import Batch, digest
from staleflow.protocols.consistency.effects import Sealed
from staleflow.protocols.consistency.errors import RestoreError
from staleflow.protocols.consistency.groups import NO_CLAIM, Group, State
from staleflow.protocols.consistency.ids import (
    BatchId,
    GroupId,
    LeaseId,
    Lineage,
    Segment,
    Step,
    TrainerTerm,
    Version,
    WorkerId,
)
from staleflow.protocols.consistency.ledger import PAGE_ROWS, STEP_ROWS, Ledger

Cell = int | str | bool | None
Row = tuple[Cell, ...]

FORMAT = 5
"""Format of the rows. It rises when an earlier release could not read them rightly."""
OLDER = (4,)
"""Formats that are read, too. 4: the digests of all payload are SHA-256."""


def row(ledger: Ledger, key: int) -> Row | None:
    if key >= PAGE_ROWS:
        mask = ledger.retired.pages.get(key - PAGE_ROWS)
        return None if mask is None else (mask,)
    if key >= STEP_ROWS:
        batch = ledger.batches.get(Step(key - STEP_ROWS))
        return None if batch is None else _batch_row(batch)
    group = ledger.groups.get(GroupId(key))
    return None if group is None else _group_row(group)


def rows(ledger: Ledger) -> dict[int, Row]:
    keys: list[int] = sorted(ledger.groups)
    keys += (STEP_ROWS + step for step in sorted(ledger.batches))
    keys += (PAGE_ROWS + page for page in sorted(ledger.retired.pages))
    return {key: stored for key in keys if (stored := row(ledger, key)) is not None}


def _group_row(group: Group) -> Row:
    """Return the row of a group. Sealed and consumed groups are stored as occupied; the batch row has the rest."""
    # Sealing and consuming a batch thereby write one row instead of one for each group.
    state = group.state
    head = (
        int(State.OCCUPIED if state in (State.SEALED, State.CONSUMED) else state),
        group.lease,
        group.worker,
        group.lineage,
        group.version,
        group.spare,
        group.claim,
        group.order,
        group.shard,
        group.sha,
        group.nbytes,
        group.truncated,
        group.sequence_tokens,
    )
    return head + tuple([number for segment in group.segments for number in segment])


def _batch_row(batch: Batch) -> Row:
    sealed = batch.sealed
    head = (batch.consumed, sealed.batch, sealed.lineage, sealed.trainer_term, sealed.masked_tokens, sealed.digest)
    return head + tuple([group.id for group in batch.left()])


def globals_row(ledger: Ledger) -> Row:
    limits, window = ledger.limits, ledger.window
    head: Row = (
        FORMAT,
        limits.max_staleness,
        limits.batch_size,
        str(limits.bound),
        window.version,
        window.step,
        ledger.trainer_term,
        ledger.trainer,
        *ledger.joined_with,
        ledger.first_sha,
        ledger.newest_sha,
        ledger.consumed_batch,
        ledger.lease_hi,
        ledger.batch_hi,
        ledger.order_hi,
        ledger.retired.floor,
        ledger.reserves,
        ledger.releases,
        ledger.occupies,
        ledger.drops,
        ledger.counts[State.CONSUMED],
        ledger.lineages.current,
        len(ledger.lineages.forks),
        len(ledger.checkpoints),
    )
    forks = tuple([number for fork in ledger.lineages.forks for number in fork])
    attempts = tuple([number for (batch, rank), n in ledger.attempts.items() for number in (batch, rank, n)])
    return head + forks + tuple(ledger.checkpoints) + attempts


def versions_in_use(ledger: Ledger) -> tuple[tuple[Lineage, Version], ...]:
    used = {ledger.checkpoints[-1], ledger.window.version}
    for holder in ledger.leases.holders.values():
        used.update(group.version for group in holder.leases.values())
    return tuple((ledger.lineages.of(version), version) for version in sorted(used) if version >= 0)


def restore(ledger: Ledger, stored: Row, rows: Iterable[tuple[int, Iterable[Cell]]], now_ms: int) -> None:
    """Fill an empty ledger from stored rows."""
    try:
        _restore_globals(ledger, stored)
        groups: list[tuple[int, Sequence[Cell]]] = []
        batches: list[tuple[int, Sequence[Cell]]] = []
        for key, cells in rows:
            cells = tuple(cells)
            if key >= PAGE_ROWS:
                ledger.retired.pages[key - PAGE_ROWS] = _int(cells[0])
            elif key >= STEP_ROWS:
                batches.append((key - STEP_ROWS, cells))
            else:
                groups.append((key, cells))
        for key, cells in groups:
            _restore_group(ledger, key, cells)
        for step, cells in sorted(batches, key=lambda batch: batch[0]):
            _restore_batch(ledger, step, cells)
        _rebuild(ledger, now_ms)
    except (TypeError, ValueError, KeyError, IndexError) as error:
        raise RestoreError(f"the stored ledger cannot be read: {error!r}") from error


def _int(cell: Cell) -> int:
    if not isinstance(cell, int):
        raise TypeError(f"{cell!r} is not a number")
    return cell


def _str(cell: Cell) -> str:
    if not isinstance(cell, str):
        raise TypeError(f"{cell!r} is not a string")
    return cell


def _restore_globals(ledger: Ledger, stored: Row) -> None:
    limits, window = ledger.limits, ledger.window
    fixed = (FORMAT, limits.max_staleness, limits.batch_size, str(limits.bound))
    if stored[1:4] != fixed[1:] or stored[0] not in (FORMAT, *OLDER):
        raise RestoreError(
            f"the ledger was stored with (format, max_staleness, batch_size, bound) {stored[:4]}, not {fixed}"
        )
    window.version, window.step = Version(_int(stored[4])), Step(_int(stored[5]))
    ledger.trainer_term, ledger.trainer = TrainerTerm(_int(stored[6])), WorkerId(_str(stored[7]))
    ledger.joined_with = (Lineage(_int(stored[8])), Version(_int(stored[9])))
    ledger.first_sha, ledger.newest_sha = _str(stored[10]), _str(stored[11])
    ledger.consumed_batch = BatchId(_int(stored[12]))
    ledger.lease_hi, ledger.batch_hi = LeaseId(_int(stored[13])), BatchId(_int(stored[14]))
    ledger.order_hi, ledger.retired.floor = _int(stored[15]), _int(stored[16])
    ledger.reserves, ledger.releases = _int(stored[17]), _int(stored[18])
    ledger.occupies, ledger.drops = _int(stored[19]), _int(stored[20])
    ledger.counts[State.CONSUMED] = _int(stored[21])
    ledger.lineages.current = Lineage(_int(stored[22]))
    numbers = [_int(cell) for cell in stored[25:]]
    end_forks = 2 * _int(stored[23])
    end_checkpoints = end_forks + _int(stored[24])
    forks, attempts = numbers[:end_forks], numbers[end_checkpoints:]
    ledger.lineages.forks = list(zip(forks[::2], forks[1::2], strict=True))
    ledger.checkpoints = [Version(number) for number in numbers[end_forks:end_checkpoints]]
    if not ledger.checkpoints:
        raise ValueError("no checkpoint is stored; at least version 0 is required")
    for batch, rank, count in zip(attempts[::3], attempts[1::3], attempts[2::3], strict=True):
        ledger.attempts[BatchId(batch), rank] = count


def _restore_group(ledger: Ledger, key: int, cells: Sequence[Cell]) -> None:
    lineage, version = Lineage(_int(cells[3])), Version(_int(cells[4]))
    deadline = ledger.window.deadline(version)
    lease, worker = LeaseId(_int(cells[1])), WorkerId(_str(cells[2]))
    group = Group(GroupId(key), lease, worker, lineage, version, deadline, bool(cells[5]))
    group.state = State(_int(cells[0]))
    group.claim, group.order = _int(cells[6]), _int(cells[7])
    group.shard, group.sha, group.nbytes = _int(cells[8]), _str(cells[9]), _int(cells[10])
    group.truncated = bool(cells[11])
    group.sequence_tokens = _int(cells[12])
    numbers = [_int(cell) for cell in cells[13:]]
    triples = zip(numbers[::3], numbers[1::3], numbers[2::3], strict=True)
    group.segments = tuple([Segment(Lineage(lin), Version(ver), tokens) for lin, ver, tokens in triples])
    group.tokens = sum(segment.tokens for segment in group.segments)
    ledger.groups[group.id] = group


def _restore_batch(ledger: Ledger, step: int, cells: Sequence[Cell]) -> None:
    ids = [GroupId(_int(id)) for id in cells[6:]]
    if step < ledger.floor:
        ids = [id for id in ids if id not in ledger.retired]
    groups = tuple([ledger.groups[id] for id in ids])
    for group in groups:
        group.state = State.CONSUMED if cells[0] else State.SEALED
        group.step = Step(step)
    members = tuple([group.member() for group in groups])
    sealed = Sealed(
        batch=BatchId(_int(cells[1])),
        lineage=Lineage(_int(cells[2])),
        step=Step(step),
        trainer_term=TrainerTerm(_int(cells[3])),
        members=members,
        tokens=sum(group.tokens for group in groups),
        masked_tokens=_int(cells[4]),
        digest=_str(cells[5]),
    )
    if step >= ledger.floor and digest(members) != sealed.digest:
        raise RestoreError(f"the batch of step {step} has another digest than its groups")
    ledger.batches[sealed.step] = Batch(sealed, groups, consumed=bool(cells[0]))


def _rebuild(ledger: Ledger, now_ms: int) -> None:
    """Rebuild the window, the leases and the counters from the groups, oldest lease first."""
    for group in sorted(ledger.groups.values(), key=lambda group: group.lease):
        if group.state < State.CONSUMED:
            ledger.counts[group.state] += 1
        if group.state is State.LEASED:
            ledger.leases.grant(group, now_ms)
        if group.state is State.OCCUPIED:
            ledger.track_staleness(group)
        if group.live:
            ledger.window.enter(group)
        if group.claim != NO_CLAIM:
            ledger.claims.append(group)
    ledger.claims.sort(key=lambda group: group.claim)
