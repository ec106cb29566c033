"""The payloads that a shard has, in memory: where each is on its way, and how to find it."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, auto

from staleflow.protocols.consistency.ids import GroupId, LeaseId
from staleflow.protocols.wire.messages import Place
from staleflow.servers.trajectories.records import Key, Pushed, Record
from staleflow.servers.trajectories.registrar import Then


class Phase(Enum):
    """Where a stored group is on its way."""

    REGISTERING = auto()
    """Its push is on the way to the scheduler."""
    STAGING = auto()
    """It waits for stages, or is in some."""
    CLOSING = auto()
    """Its occupy or release is on the way to the scheduler."""
    SETTLED = auto()
    """It waits for the trainer, or for ``Retention`` to let it go."""


@dataclass(slots=True, eq=False)
class Incoming:
    """A payload that the next commit stores."""

    pushed: Pushed
    waiting: list[Then]


@dataclass(slots=True)
class Held:
    """One stored payload."""

    key: Key
    record: Record
    phase: Phase = Phase.REGISTERING
    done: dict[str, int] = field(default_factory=dict[str, int])
    """Stages that are done, in order, each with the ticket that finished it; -1 when an earlier process did."""
    queued: set[str] = field(default_factory=set[str])
    """Stages that were asked for their columns by this process."""
    keep: bool | None = None
    """Whether the filter wants it; None before the reward stage is done."""
    waiting: list[Then] = field(default_factory=list[Then])
    """Told once the push is registered."""

    @property
    def resting(self) -> bool:
        """True while nothing about it is on the way to the scheduler."""
        return self.phase in (Phase.STAGING, Phase.SETTLED)


class Holdings:
    """All stored payloads; several leases of one group may be there for a while."""

    def __init__(self) -> None:
        self._groups: dict[GroupId, dict[LeaseId, Held]] = {}

    def __iter__(self) -> Iterator[Held]:
        for leases in self._groups.values():
            yield from leases.values()

    def add(self, held: Held) -> None:
        """Keep a payload under its key."""
        self._groups.setdefault(held.key.group, {})[held.key.lease] = held

    def remove(self, key: Key) -> bool:
        """Forget a payload; says whether it was there."""
        leases = self._groups.get(key.group, {})
        found = leases.pop(key.lease, None) is not None
        if not leases:
            self._groups.pop(key.group, None)
        return found

    def find(self, key: Key) -> Held | None:
        """A payload by its key."""
        return self._groups.get(key.group, {}).get(key.lease)

    def find_sha(self, group: GroupId, sha: str) -> Held | None:
        """A payload by its group and its bytes."""
        return next((held for held in self._groups.get(group, {}).values() if held.record.sha == sha), None)

    def older(self, key: Key) -> list[Held]:
        """Payloads of earlier leases of the same group."""
        return [held for lease, held in self._groups.get(key.group, {}).items() if lease < key.lease]


def place_of(held: Held) -> Place | None:
    """Where a reader on this host finds the payload; None when the store has it."""
    record = held.record
    return Place(slab=record.slab, offset=record.offset, nbytes=record.nbytes) if record.slab else None
