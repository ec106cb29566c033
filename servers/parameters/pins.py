"""Pins of versions by workers. A pinned version is not deleted."""

from staleflow.protocols.wire.messages import Unpin
from staleflow.servers.parameters.versions import VersionKey

MAX_OF_ONE = 16
"""Maximum number of versions that one worker pins. An engine needs three: its current one, that one's base, and the
next."""
MAX_PER_KEY = 32
"""Maximum number of versions that all workers of one key pin together, however many names they use; without keys, all
workers.

The workers of a run use few versions at a time, and mostly the same ones.
"""


class Pins:
    """Set of (worker, version) pairs; adding a pair again has no effect on its existence."""

    def __init__(self) -> None:
        self._of: dict[str, dict[VersionKey, bool]] = {}
        """By worker and version: True if in use, False if it is only the base of the worker's next delta."""
        self._owners: dict[str, str] = {}
        """Access key that each worker came with; empty without one."""
        self._by_owner: dict[str, dict[VersionKey, set[str]]] = {}
        """By access key: the versions that its workers pin, each with those workers. The most recently pinned
        version comes last."""

    def add(self, worker: str, key: VersionKey, owner: str = "") -> None:
        """Pin the version for ``worker``, which came with the access key ``owner``.

        Beyond ``MAX_OF_ONE`` versions of the worker, or ``MAX_PER_KEY`` of the key, the oldest pin is removed.
        """
        if self._owners.get(worker, owner) != owner:
            self.forget(worker)
        self._owners[worker] = owner
        pinned = self._of.setdefault(worker, {})
        pinned.pop(key, None)
        pinned[key] = True
        versions = self._by_owner.setdefault(owner, {})
        versions[key] = versions.pop(key, set()) | {worker}
        if len(pinned) > MAX_OF_ONE:
            self.remove(worker, next(iter(pinned)))
        if len(versions) > MAX_PER_KEY:
            oldest = next(iter(versions))
            for other in tuple(versions[oldest]):
                self.remove(other, oldest)

    def release(self, ask: Unpin) -> None:
        """Remove a pin, or keep its version only as a base, as a reader requests."""
        release = self.keep_as_base if ask.base else self.remove
        release(ask.worker, VersionKey(ask.lineage, ask.version))

    def keep_as_base(self, worker: str, key: VersionKey) -> None:
        """Keep the version only as a base of the worker's next delta, if the worker has pinned it."""
        if key in (pinned := self._of.get(worker, {})):
            pinned[key] = False

    def remove(self, worker: str, key: VersionKey) -> None:
        """Remove a pin, if it exists."""
        pinned = self._of.get(worker, {})
        if pinned.pop(key, None) is None:
            return
        owner = self._owners[worker]
        versions = self._by_owner[owner]
        versions[key].discard(worker)
        if not versions[key]:
            del versions[key]
        if not versions:
            del self._by_owner[owner]
        if not pinned:
            del self._of[worker], self._owners[worker]

    def forget(self, worker: str) -> None:
        """Remove all pins of a lost worker."""
        for key in tuple(self._of.get(worker, ())):
            self.remove(worker, key)

    def of(self, key: VersionKey) -> tuple[str, ...]:
        """Return the workers that pin this version, as a base included."""
        return tuple(worker for worker, pinned in self._of.items() if key in pinned)

    def in_use(self, key: VersionKey) -> bool:
        """Return True if a worker uses the version, other than as a base."""
        return any(pinned.get(key, False) for pinned in self._of.values())
