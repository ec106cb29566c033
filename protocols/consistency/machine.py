"""The ledger as one pure machine: events in, effects out. Everything that affects it goes through ``Machine.apply``.

- No IO, no clock, no randomness, standard library only; the same events always give the same effects.
- A normal refusal is a ``Rejected`` effect. An event that the state cannot allow raises ``TransitionError``. Neither
  changes anything.
- The consequences of an event (a promotion, a drop, a seal) are part of its effects, in order.
- ``take_dirty`` returns every changed row. A store must write these rows before the effects are carried out.

Reading order: limits, events, effects, window and bucket (the rule), ledger (the moves), then admission, production,
training, settle, rollback.
"""

from collections.abc import Iterable
from heapq import nsmallest
from typing import Final, assert_never

from staleflow.protocols.consistency import admission, invariants, production, settle, snapshot, training
from staleflow.protocols.consistency.effects import Effect, Member, Sealed
from staleflow.protocols.consistency.events import (
    Checkpointed,
    Claim,
    Consume,
    Deliver,
    Detach,
    Drop,
    Event,
    Join,
    Migrate,
    Occupy,
    Publish,
    Push,
    Quarantine,
    Release,
    Renew,
    Reserve,
    Tick,
)
from staleflow.protocols.consistency.groups import GroupView, State, view
from staleflow.protocols.consistency.ids import GroupId, LeaseId, Lineage, Step, TrainerTerm, Version, WorkerId
from staleflow.protocols.consistency.ledger import Ledger
from staleflow.protocols.consistency.limits import Limits
from staleflow.protocols.consistency.snapshot import Cell, Row

_COUNTED: Final = {state.name.lower(): state for state in State if state <= State.CONSUMED}
"""States whose groups are counted, by name."""


class Machine:
    """The consistency protocol.

    ``now_ms`` is any clock that never goes back; it decides nothing but expiry. The shell passes its running time,
    which excludes its own pauses.
    """

    __slots__ = ("_ledger",)

    def __init__(self, limits: Limits) -> None:
        self._ledger = Ledger(limits)

    def apply(self, event: Event, now_ms: int) -> tuple[Effect, ...]:
        """Apply one event and return the effects, in the order they must be carried out.

        Raises ``TransitionError``, with nothing changed, when the event is illegal in this state.
        """
        ledger = self._ledger
        self._handle(event, now_ms)
        # An event without effects leaves nothing to settle. A tick always settles: truncations are not stored, and the
        # first tick after a restart must emit them again.
        if ledger.out or type(event) is Tick:
            settle.settle(ledger, now_ms)
        effects = tuple(ledger.out)
        ledger.out.clear()
        if ledger.story is not None:
            ledger.story.add(effects)
            self.check()
        return effects

    def _handle(self, event: Event, now_ms: int) -> None:
        ledger = self._ledger
        match event:
            case Renew():
                ledger.leases.renew(event.worker, now_ms)
            case Reserve():
                admission.reserve(ledger, event, now_ms)
            case Push():
                production.push(ledger, event)
            case Occupy():
                production.occupy(ledger, event)
            case Tick():
                admission.tick(ledger, now_ms)
            case Release():
                production.release(ledger, event)
            case Migrate():
                admission.migrate(ledger, event, now_ms)
            case Detach():
                admission.detach(ledger, event)
            case Drop():
                production.drop(ledger, event)
            case Quarantine():
                production.quarantine(ledger, event)
            case Claim():
                training.claim(ledger, event)
            case Deliver():
                training.deliver(ledger, event)
            case Consume():
                training.consume(ledger, event)
            case Checkpointed():
                training.checkpointed(ledger, event)
            case Publish():
                training.publish(ledger, event)
            case Join():
                training.join(ledger, event)
            case _:
                assert_never(event)

    # --- state ---------------------------------------------------------------------------------------------------

    @property
    def limits(self) -> Limits:
        return self._ledger.limits

    @property
    def version(self) -> Version:
        """v: the newest published version; -1 before version 0."""
        return self._ledger.window.version

    @property
    def lineage(self) -> Lineage:
        return self._ledger.lineages.current

    @property
    def next_step(self) -> Step:
        """s: the next step to seal."""
        return self._ledger.window.step

    @property
    def trainer_term(self) -> TrainerTerm:
        return self._ledger.trainer_term

    @property
    def trainer(self) -> WorkerId:
        """The trainer that joined last; empty before the first join."""
        return self._ledger.trainer

    @property
    def lease_hi(self) -> LeaseId:
        """The highest lease number granted so far."""
        return self._ledger.lease_hi

    @property
    def checkpoint(self) -> tuple[Lineage, Version]:
        """The newest checkpoint from which a trainer is guaranteed to be able to resume."""
        version = self._ledger.checkpoints[-1]
        return self.lineage_of(version), version

    @property
    def oldest_checkpoint(self) -> tuple[Lineage, Version]:
        """The oldest checkpoint from which a trainer can resume; all later batches are kept."""
        return self.lineage_of(self._ledger.floor), self._ledger.floor

    @property
    def checkpoints(self) -> tuple[Version, ...]:
        """The versions from which a trainer can resume, ascending."""
        return tuple(self._ledger.checkpoints)

    @property
    def forks(self) -> tuple[tuple[int, int], ...]:
        """(lineage, its first own version) of the surviving history, both ascending."""
        return tuple(self._ledger.lineages.forks)

    @property
    def newest_sha(self) -> str:
        """Hash of the newest version's manifest; empty if a rollback made that version the newest."""
        return self._ledger.newest_sha

    def lineage_of(self, version: Version) -> Lineage:
        """Return the lineage in which a surviving version was published."""
        return self._ledger.lineages.of(version)

    def survives(self, lineage: Lineage, version: Version) -> bool:
        """Return True if (lineage, version) is published and no rollback abandoned it."""
        return version <= self.version and self._ledger.lineages.survives(lineage, version)

    # --- queries of the shell ------------------------------------------------------------------------------------

    def room(self, version: Version) -> int:
        """Return the number of groups that could be leased at ``version`` now, counted groups and spares together."""
        return admission.room(self._ledger, version)

    def leases_of(self, worker: WorkerId) -> tuple[tuple[GroupId, LeaseId], ...]:
        """Return the (group, lease) pairs that a worker holds, oldest grant first."""
        return tuple((group.id, group.lease) for group in self._ledger.leases.of(worker))

    def group(self, id: GroupId) -> GroupView | None:
        """Return the ledger's record of a group; None if it was never leased or is retired."""
        group = self._ledger.groups.get(id)
        return None if group is None else view(group, self._ledger.window.token_bound)

    def retired(self, id: GroupId) -> bool:
        """Return True if the id may never be reserved again."""
        return id in self._ledger.retired

    def state_counts(self) -> dict[str, int]:
        """Return the number of groups in each state, including spares.

        ``consumed`` counts every consumed group of the surviving history.
        """
        ledger = self._ledger
        counts = {name: ledger.counts[state] for name, state in _COUNTED.items()}
        return counts | {"spares": ledger.window.num_spares, "claimed": ledger.window.claimed}

    def totals(self) -> dict[str, int]:
        """Return the number of moves since the start of the run, by kind."""
        ledger = self._ledger
        return {
            "reserves": ledger.reserves,
            "releases": ledger.releases,
            "occupies": ledger.occupies,
            "drops": ledger.drops,
        }

    def window(self) -> tuple[tuple[Step, int, int, int], ...]:
        """Return rows (deadline, leased, pushed, occupied) of the counted groups.

        Under the token bound there is one row, of step 0.
        """
        return self._ledger.window.rows()

    def pins(self) -> tuple[GroupId, ...]:
        """Return the groups that keep the next step from being sealed; empty if the step is starved or not pinned."""
        return tuple(group.id for group in settle.pins(self._ledger))

    def starved(self) -> bool:
        """Return True if too few groups are occupied for the next step."""
        window = self._ledger.window
        return window.occupied + window.claimed < window.batch_size

    def claimable(self) -> GroupId | None:
        """Return the group that a streaming trainer may claim for the next step now."""
        group = training.claimable(self._ledger)
        return None if group is None else group.id

    @property
    def num_claimed(self) -> int:
        """Number of members of the next step's batch that are already fixed."""
        return self._ledger.window.claimed

    def claims(self) -> tuple[Member, ...]:
        """Return the members of the next step's batch that are fixed before it is sealed, in order."""
        return tuple(group.member() for group in self._ledger.claims)

    def sealed_batch(self, step: Step) -> Sealed | None:
        """Return the batch of ``step`` as it was sealed; None if it is not sealed or already consumed."""
        batch = self._ledger.batches.get(step)
        return None if batch is None or batch.consumed else batch.sealed

    def versions_in_use(self) -> tuple[tuple[Lineage, Version], ...]:
        """Return the versions that must stay stored, ascending: the newest, the newest checkpoint's, those of leases.

        A trainer that resumes from an older checkpoint publishes its version again.
        """
        return snapshot.versions_in_use(self._ledger)

    def must_keep(self, id: GroupId) -> bool:
        """Return True if a payload of this group is needed, or may be needed by a push in progress."""
        group = self._ledger.groups.get(id)
        if group is None or group.state is State.RELEASED:
            return False
        return group.state is not State.CONSUMED or group.step >= self._ledger.floor

    def expected(self, shard: int, after: GroupId, limit: int) -> list[tuple[GroupId, str]]:
        """Return (group, sha) of payloads that a shard must have, for the ``limit`` lowest groups above ``after``.

        Consumed groups are not included: a lost payload of one matters only after a rollback makes it occupied again.
        """
        wanted = (State.PUSHED, State.OCCUPIED, State.SEALED)
        stored = (group for group in self._ledger.groups.values() if group.shard == shard and group.id > after)
        return nsmallest(limit, ((group.id, group.sha) for group in stored if group.state in wanted))

    def story(self, id: GroupId) -> tuple[str, ...]:
        """Return the last effects on one group, oldest first. Kept in debug mode only."""
        return self._ledger.story.of(id) if self._ledger.story is not None else ()

    # --- storage -------------------------------------------------------------------------------------------------

    def take_dirty(self) -> tuple[int, ...]:
        """Return and clear the keys of changed rows: group ids, and from 2**61 on batches and pages of retired ids."""
        dirty = tuple(self._ledger.dirty)
        self._ledger.dirty.clear()
        return dirty

    def row(self, key: int) -> Row | None:
        """Return the row to store under ``key``: flat integers, strings and booleans; None means delete it."""
        return snapshot.row(self._ledger, key)

    def place(self, key: int) -> int:
        """Return the number under which to store the row of ``key``, so that rows that change together lie together.

        The place of a group is its lease, so it changes with the row. No two rows ever have the same place.
        """
        group = self._ledger.groups.get(GroupId(key))
        return key if group is None else group.lease

    def rows(self) -> dict[int, Row]:
        """Return every row, ascending by key."""
        return snapshot.rows(self._ledger)

    def globals_row(self) -> Row:
        """Return the state that is in no other row. It is small and changes with most events."""
        return snapshot.globals_row(self._ledger)

    @classmethod
    def restore(
        cls, limits: Limits, globals_row: Iterable[Cell], rows: Iterable[tuple[int, Iterable[Cell]]], now_ms: int
    ) -> "Machine":
        """Restore a stored machine. Every lease is extended to a full ``lease_ms`` from now.

        Raises ``RestoreError`` if the rows are not a valid ledger.
        """
        machine = cls(limits)
        snapshot.restore(machine._ledger, tuple(globals_row), rows, now_ms)
        return machine

    def snapshot(self) -> tuple[Row, tuple[tuple[int, Row], ...]]:
        """Return the whole state except the times of leases, hashable. Machines with equal snapshots behave alike."""
        return self.globals_row(), tuple(self.rows().items())

    def check(self) -> None:
        """Raise ``InvariantError`` unless I1 to I6 hold and every counter equals a recount."""
        invariants.check(self._ledger)
