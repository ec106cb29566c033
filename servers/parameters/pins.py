"""Who uses which version: pinned versions are not deleted."""

from staleflow.servers.parameters.versions import VersionKey


class Pins:
    """Pairs of worker and version; a pair is there once, however often it is added."""

    def __init__(self) -> None:
        self._of: dict[str, dict[VersionKey, None]] = {}

    def add(self, worker: str, key: VersionKey) -> None:
        """``worker`` uses the version from now on."""
        self._of.setdefault(worker, {})[key] = None

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
        """Who pins this version."""
        return [worker for worker, pinned in self._of.items() if key in pinned]
