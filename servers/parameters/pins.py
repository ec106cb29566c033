"""Who uses which version: pinned versions are not deleted."""

from staleflow.servers.parameters.versions import VersionKey

MAX_OF_ONE = 16
"""Versions that one worker pins at once. An engine needs three: the one that it has, its base, and the next."""
MAX_PER_KEY = 32
"""Versions that all workers of one key pin at once, however many names they have; without keys, all workers.

The workers of a run use few versions at a time, and mostly the same."""


class Pins:
    """Pairs of worker and version; a pair is there once, however often it is added."""

    def __init__(self) -> None:
        self._of: dict[str, dict[VersionKey, bool]] = {}
        """True: in use; False: only the base of the worker's next delta."""
        self._owners: dict[str, str] = {}
        """By worker: the key that it came with, empty without one."""
        self._by_owner: dict[str, dict[VersionKey, set[str]]] = {}
        """By key: the versions that its workers pin, and which do; the version that was pinned last comes last."""

    def add(self, worker: str, key: VersionKey, owner: str = "") -> None:
        """``worker``, with the key ``owner``, uses the version from now on.

        Beyond ``MAX_OF_ONE`` versions of the worker, or ``MAX_PER_KEY`` of the key, the oldest goes.
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

    def keep_as_base(self, worker: str, key: VersionKey) -> None:
        """``worker`` would like to have the next version as what changed since this one, if it has pinned it."""
        if key in (pinned := self._of.get(worker, {})):
            pinned[key] = False

    def remove(self, worker: str, key: VersionKey) -> None:
        """``worker`` does not use it any more, if it ever did."""
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
        """``worker`` is gone."""
        for key in tuple(self._of.get(worker, ())):
            self.remove(worker, key)

    def of(self, key: VersionKey) -> list[str]:
        """Who pins this version, if only as a base."""
        return [worker for worker, pinned in self._of.items() if key in pinned]

    def in_use(self, key: VersionKey) -> bool:
        """Whether somebody needs it for more than a base."""
        return any(pinned.get(key, False) for pinned in self._of.values())
