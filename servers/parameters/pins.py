"""Who uses which version: pinned versions are not deleted."""

from staleflow.servers.parameters.versions import VersionKey

MOST_OF_ONE = 16
"""Versions that one worker pins at once. An engine needs three: the one that it has, its base, and the next."""


class Pins:
    """Pairs of worker and version; a pair is there once, however often it is added."""

    def __init__(self) -> None:
        self._of: dict[str, dict[VersionKey, bool]] = {}
        """True: in use; False: only the base of the worker's next delta."""

    def add(self, worker: str, key: VersionKey) -> None:
        """``worker`` uses the version from now on; beyond ``MOST_OF_ONE`` the oldest goes."""
        pinned = self._of.setdefault(worker, {})
        pinned.pop(key, None)
        pinned[key] = True
        if len(pinned) > MOST_OF_ONE:
            del pinned[next(iter(pinned))]

    def keep_as_base(self, worker: str, key: VersionKey) -> None:
        """``worker`` would like to have the next version as what changed since this one, if it has pinned it."""
        if key in (pinned := self._of.get(worker, {})):
            pinned[key] = False

    def remove(self, worker: str, key: VersionKey) -> None:
        """``worker`` does not use it any more, if it ever did."""
        pinned = self._of.get(worker, {})
        pinned.pop(key, None)
        if not pinned:
            self._of.pop(worker, None)

    def forget(self, worker: str) -> None:
        """``worker`` is gone."""
        self._of.pop(worker, None)

    def of(self, key: VersionKey) -> list[str]:
        """Who pins this version, if only as a base."""
        return [worker for worker, pinned in self._of.items() if key in pinned]

    def in_use(self, key: VersionKey) -> bool:
        """Whether somebody needs it for more than a base."""
        return any(pinned.get(key, False) for pinned in self._of.values())
