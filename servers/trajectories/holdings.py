"""In-memory index of the payloads that a shard has stored, with the phase of each."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, auto

from staleflow.protocols.consistency.ids import GroupId, LeaseId
from staleflow.protocols.wire.messages import Place
from staleflow.servers.trajectories.records import Key, Pushed, Record
from staleflow.servers.trajectories.registrar import Then


class Phase(Enum):
    """Phase of a stored group."""

    REGISTERING = auto()
    """Its push is being registered with the scheduler."""
    STAGING = auto()
    """It waits for stages, or some are processing it."""
    CLOSING = auto()
    """Its occupy or release is in flight to the scheduler."""
    SETTLED = auto()
    """It waits for the trainer, or for ``Retention`` to release it."""


@dataclass(slots=True, eq=False)
class Incoming:
    """A payload that the next commit stores."""

    pushed: Pushed
    waiting: list[Then]


@dataclass(slots=True)
class StoredGroup:
    """One stored payload and its progress."""

    key: Key
    record: Record
    phase: Phase = Phase.REGISTERING
    done: dict[str, int] = field(default_factory=dict[str, int])
    """Finished stages in order, each with the ticket that finished it; -1 if an earlier process did."""
    queued: set[str] = field(default_factory=set[str])
    """Stages that this process has queued the group for."""
    keep: bool | None = None
    """Verdict of the filter; None before the reward stage is done."""
    reward: float | None = None
    """Mean reward of its samples; None before the reward stage is done."""
    waiting: list[Then] = field(default_factory=list[Then])
    """Called once the push is registered."""

    @property
    def resting(self) -> bool:
        """True while no operation on it is in flight to the scheduler."""
        return self.phase in (Phase.STAGING, Phase.SETTLED)


class Holdings:
    """All stored payloads. Several leases of one group may coexist for a while."""

    def __init__(self) -> None:
        self._groups: dict[GroupId, dict[LeaseId, StoredGroup]] = {}

    def __iter__(self) -> Iterator[StoredGroup]:
        for leases in self._groups.values():
            yield from leases.values()

    def add(self, stored: StoredGroup) -> None:
        """Add a payload under its key."""
        self._groups.setdefault(stored.key.group, {})[stored.key.lease] = stored

    def remove(self, key: Key) -> bool:
        """Remove a payload; return True if it was stored."""
        leases = self._groups.get(key.group, {})
        removed = leases.pop(key.lease, None) is not None
        if not leases:
            self._groups.pop(key.group, None)
        return removed

    def find(self, key: Key) -> StoredGroup | None:
        """Return the payload with this key, or None."""
        return self._groups.get(key.group, {}).get(key.lease)

    def find_sha(self, group: GroupId, sha: str) -> StoredGroup | None:
        """Return a payload of this group with these bytes, or None."""
        return next((stored for stored in self._groups.get(group, {}).values() if stored.record.sha == sha), None)

    def older(self, key: Key) -> list[StoredGroup]:
        """Return the payloads of earlier leases of the same group."""
        return [stored for lease, stored in self._groups.get(key.group, {}).items() if lease < key.lease]


def place_of(stored: StoredGroup) -> Place | None:
    """Return where a reader on this host finds the payload; None if it lies in the store."""
    record = stored.record
    return Place(slab=record.slab, offset=record.offset, nbytes=record.nbytes) if record.slab else None
