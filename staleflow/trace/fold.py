"""The state of a run after each line of its trace, for all readers except the auditor.

A reader iterates over ``Fold.over``, takes what it needs from the state after each line, and keeps nothing else of the
line. The fold keeps the live groups and the batches that a rollback could still restore, so that its memory does not
grow with the trace. It trusts the trace: an event about an unknown group or batch changes nothing.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from msgspec import UnsetType

from staleflow.protocols.consistency.groups import CONSUMED, LEASED, NO_CLAIM, OCCUPIED, PUSHED, SEALED, Group, State
from staleflow.trace import events
from staleflow.trace.reader import Line


@dataclass(slots=True)
class _Piece:
    """One incarnation, by the monotonic clock of its boot."""

    begin_s: float
    end_s: float
    """Time of its last line."""
    zero_s: float
    """Second 0 of the axis on this clock."""


class Axis:
    """Map monotonic clocks to seconds since the first line of a trace.

    The time between the last line of an incarnation and the next ``open`` does not count, within one boot or across
    two.
    """

    def __init__(self) -> None:
        self._pieces: list[_Piece] = []

    def see(self, line: Line) -> float:
        """Return the time of the next line of the trace."""
        mono_s = line.m / 1e9
        piece = self._pieces[-1] if self._pieces else None
        if piece is None or line.ev == "open" or mono_s < piece.end_s:
            before_s = piece.end_s - piece.zero_s if piece is not None else 0.0
            piece = _Piece(mono_s, mono_s, mono_s - before_s)
            self._pieces.append(piece)
        piece.end_s = mono_s
        return mono_s - piece.zero_s

    def at(self, mono_s: float) -> float:
        """Return the time of any moment; a moment between two incarnations maps to the end of the first."""
        if not self._pieces:
            return mono_s
        started = [piece for piece in self._pieces if piece.begin_s <= mono_s] or self._pieces[:1]
        inside = (piece for piece in started if mono_s <= piece.end_s)
        piece = next(inside, None) or max(started, key=lambda piece: piece.end_s)
        return (mono_s if piece is self._pieces[-1] else min(mono_s, piece.end_s)) - piece.zero_s


class TracedGroup(Group):
    """The ledger's record of a group, with the times of its life.

    A group that is released or dropped keeps its last state.
    """

    __slots__ = ("occupied_s", "pushed_s", "reserved_s")

    def __init__(self, event: events.Reserve, now_s: float) -> None:
        deadline = event.deadline or 0
        super().__init__(event.group, event.lease, event.worker, event.lineage, event.version, deadline, event.spare)
        self.reserved_s = self.pushed_s = self.occupied_s = now_s


@dataclass(slots=True, kw_only=True)
class Batch:
    """A sealed or consumed batch."""

    step: int
    lineage: int
    groups: list[TracedGroup]
    """Its groups, without those whose lease the trace does not contain. Empty once no rollback can restore them."""
    last: TracedGroup | None
    """The last group that was ready to train, for which its step waited."""
    ages: Counter[int]
    """Number of its groups by age, step - version."""
    tokens: int
    masked_tokens: int
    sealed_s: float
    waited_s: float
    """Seconds between the publish of its weights and its seal."""
    writing_s: float
    """Mean seconds of its groups from the lease to the push."""
    staging_s: float
    """Mean seconds from the push until all stages finished."""
    queueing_s: float
    """Mean seconds from then until the seal."""
    delivered_s: float | None = None
    """Time of the first delivery."""
    consumed_s: float = 0.0

    @property
    def trained_tokens(self) -> int:
        return self.tokens - self.masked_tokens

    @property
    def age_mean(self) -> float:
        """Versions."""
        return sum(age * count for age, count in self.ages.items()) / max(self.ages.total(), 1)

    @property
    def age_max(self) -> int:
        """Versions."""
        return max(self.ages, default=0)


class Fold:
    """State of a run after the lines so far."""

    def __init__(self) -> None:
        self.axis = Axis()
        self.now_s = 0.0
        self.run = ""
        self.incarnation = 0
        self.opening: events.Open | None = None
        """The newest one."""
        self.opened_s = 0.0
        self.closed: events.Close | None = None
        """The orderly end of the last incarnation; None if it still runs or crashed."""
        self.lineage = 0
        self.version = -1
        self.step = 0
        """The next step to seal."""
        self.term = 0
        self.workers: dict[str, str] = {}
        """Role of each attached worker."""
        self.groups: dict[int, TracedGroup] = {}
        """Live and sealed groups."""
        self.batches: dict[int, Batch] = {}
        """Sealed batches that are not consumed."""
        self.trained: list[Batch] = []
        """Consumed batches that were not rolled back."""
        self.counts = [0] * len(State)
        """Number of groups by state. Groups leave ``CONSUMED`` by a rollback only."""
        self.group: TracedGroup | None = None
        """The group of the last event, even if the event ended it; None if it has none or an unknown one."""
        self.batch: Batch | None = None
        """The batch of the last event, likewise."""
        self._occupied = 0
        self._free_s = 0.0
        """Time of the newest publish or join, from which on the trainer wants the next batch."""

    def over(self, lines: Iterable[Line]) -> Iterator[Line]:
        """Apply and yield line by line. Times are running time, without the periods in which no scheduler ran."""
        for line in lines:
            self.see(line, self.axis.see(line))
            yield line

    def see(self, line: Line, now_s: float) -> None:
        """Apply the next line; ``now_s`` is its time by the clock of the reader."""
        self.now_s, self.group, self.batch = now_s, None, None
        match line.event:
            case events.Reserve() as event:
                self.group = self.groups[event.group] = TracedGroup(event, now_s)
                self.counts[LEASED] += 1
            case events.Push() as event if (group := self._known_group(event.group)) is not None:
                group.pushed_s, group.tokens, group.truncated = now_s, event.tokens, event.truncated
                self._move(group, PUSHED)
            case events.Occupy() as event if (group := self._known_group(event.group)) is not None:
                self._occupied += 1
                group.occupied_s, group.order = now_s, self._occupied
                self._move(group, OCCUPIED)
            case events.Release() | events.Drop() as event if (group := self._known_group(event.group)) is not None:
                if isinstance(event, events.Drop) and group.claim != NO_CLAIM:
                    self._unclaim()
                del self.groups[group.id]
                self.counts[group.state] -= 1
            case events.Claim() as event if (group := self._known_group(event.group)) is not None:
                group.claim = 0
            case events.Promote() as event:
                for id, spare in ((event.group, False), (event.demoted, True)):
                    if not isinstance(id, UnsetType) and (group := self.groups.get(id)) is not None:
                        group.spare = spare
            case events.Seal() as event:
                self.batch = self.batches[event.batch] = self._sealed(event)
                self.step = event.step + 1
            case events.Deliver() as event if (batch := self._known_batch(event.batch)) is not None:
                batch.delivered_s = now_s if batch.delivered_s is None else batch.delivered_s
            case events.Consume() as event if (batch := self._known_batch(event.batch)) is not None:
                self._consume(batch)
                del self.batches[event.batch]
            case events.Unseal() as event if (batch := self._known_batch(event.batch)) is not None:
                self._unclaim()
                self._restore(batch)
                del self.batches[event.batch]
                self.step = min(self.step, batch.step)
            case events.Publish() as event:
                self.version, self._free_s = event.version, now_s
            case events.CheckpointKept() as event:
                for batch in self.trained:
                    if batch.step < event.version:
                        batch.groups = []
            case events.Rollback() as event:
                self._roll_back(event)
            case events.Join() as event:
                self.term, self._free_s = event.trainer_term, now_s
            case events.Attach() as event:
                self.workers[event.worker] = event.role
            case events.Detach() as event:
                self.workers.pop(event.worker, None)
            case events.Open() as event:
                self.run, self.incarnation, self.opening = line.run, line.inc, event
                self.opened_s, self.closed = now_s, None
            case events.Close() as event:
                self.closed = event
            case _:
                pass

    def _known_group(self, id: int) -> TracedGroup | None:
        self.group = self.groups.get(id)
        return self.group

    def _known_batch(self, id: int) -> Batch | None:
        self.batch = self.batches.get(id)
        return self.batch

    def _sealed(self, event: events.Seal) -> Batch:
        groups = [group for member in event.members if (group := self.groups.get(member.group)) is not None]
        number = max(len(groups), 1)
        for group in groups:
            group.claim = NO_CLAIM
            self._move(group, SEALED)
        return Batch(
            step=event.step,
            lineage=event.lineage,
            groups=groups,
            ages=Counter(event.step - member.version for member in event.members),
            tokens=event.tokens,
            masked_tokens=event.masked_tokens,
            sealed_s=self.now_s,
            waited_s=self.now_s - self._free_s if event.step == self.version else 0.0,
            last=max(groups, key=lambda group: group.occupied_s, default=None),
            writing_s=sum(group.pushed_s - group.reserved_s for group in groups) / number,
            staging_s=sum(group.occupied_s - group.pushed_s for group in groups) / number,
            queueing_s=sum(self.now_s - group.occupied_s for group in groups) / number,
        )

    def _consume(self, batch: Batch) -> None:
        batch.consumed_s = self.now_s
        self.trained.append(batch)
        for group in batch.groups:
            self._move(group, CONSUMED)
            self.groups.pop(group.id, None)

    def _roll_back(self, event: events.Rollback) -> None:
        to = self.version = self.step = event.to_version
        self.lineage = event.lineage
        self._unclaim()
        for batch in (*self.trained, *self.batches.values()):
            if batch.step >= to:
                self._restore(batch)
        self.trained = [batch for batch in self.trained if batch.step < to]
        self.batches = {id: batch for id, batch in self.batches.items() if batch.step < to}

    def _restore(self, batch: Batch) -> None:
        """Make the groups of a batch that is void ready to train again."""
        for group in batch.groups:
            group.spare = False
            self.groups[group.id] = group
            self._move(group, OCCUPIED)

    def _unclaim(self) -> None:
        """Release the claims of a streaming trainer: its groups may become part of another batch."""
        for group in self.groups.values():
            group.claim = NO_CLAIM

    def _move(self, group: TracedGroup, state: State) -> None:
        self.counts[group.state] -= 1
        self.counts[state] += 1
        group.state = state


def ages(batches: Iterable[Batch]) -> Counter[int]:
    """Return the number of groups by age."""
    total: Counter[int] = Counter()
    for batch in batches:
        total.update(batch.ages)
    return total
