"""Failed tries of each group, durable, so that a restart of the scheduler does not try a failing prompt from the start.

Without this record, a scheduler that is killed every few seconds never gives a failing prompt up: it leases the failing
prompts again and again, and each occupies a place of the window until it has failed.
"""

import msgspec

from staleflow.protocols.consistency.ids import GroupId
from staleflow.store.base import Read, Write, key_number, number_key

TABLE = "deck"
_PREFIX = b"tries"
MAX_TRIED = 65_536
"""Maximum number of groups whose failures are stored; beyond it, the oldest record is deleted."""


class Tries(msgspec.Struct):
    """Failures of one group."""

    failures: int = 0
    counted: int = 0
    """Failures that count against the prompt."""
    instances: list[str] = []
    """Names of the instances with failures that count, each once."""


class GroupTries:
    """The tries of every group that has failed and was neither trained nor given up since."""

    def __init__(self) -> None:
        self._tries: dict[GroupId, Tries] = {}
        self._changed: set[GroupId] = set()

    def __getitem__(self, group: GroupId) -> Tries:
        """Return the tries of a group; those of a group that has not failed are empty and not stored."""
        return self._tries.get(group) or Tries()

    def __len__(self) -> int:
        return len(self._tries)

    def add(self, group: GroupId, instance: str = "", *, counts: bool) -> None:
        """Add a failure. ``instance``: name of the rollout worker; empty if a stage failed the group."""
        tries = self._tries.setdefault(group, Tries())
        tries.failures += 1
        tries.counted += counts
        if counts and instance and instance not in tries.instances:
            tries.instances.append(instance)
        self._changed.add(group)
        if len(self._tries) > MAX_TRIED:
            self.forget(next(iter(self._tries)))

    def forget(self, group: GroupId) -> None:
        """Delete the tries of a group that has succeeded or was given up; no-op if it has none."""
        if self._tries.pop(group, None) is not None:
            self._changed.add(group)

    def clear(self) -> None:
        """Delete all tries: a resumed run may have another reward, environment or engine."""
        self._changed.update(self._tries)
        self._tries.clear()

    def load(self, txn: Read) -> None:
        """Restore the last saved state."""
        self._changed.clear()
        self._tries = {
            GroupId(key_number(key[len(_PREFIX) :])): msgspec.msgpack.decode(raw, type=Tries)
            for key, raw in txn.items(TABLE)
            if key.startswith(_PREFIX)
        }

    @property
    def changed(self) -> bool:
        """True if unsaved changes exist."""
        return bool(self._changed)

    def save(self, txn: Write) -> None:
        """Write the changes since the last call of ``saved``."""
        for group in sorted(self._changed):
            key = _PREFIX + number_key(group)
            if (tries := self._tries.get(group)) is None:
                txn.delete(TABLE, key)
            else:
                txn.put(TABLE, key, msgspec.msgpack.encode(tries))

    def saved(self) -> None:
        """Note that the changes of ``save`` are durable."""
        self._changed.clear()
