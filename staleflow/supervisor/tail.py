"""Follow the output file of a process, line by line."""

from pathlib import Path


class Tail:
    """Read the lines that are appended after this object was created. The file need not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = path.stat().st_size if path.exists() else 0

    def take(self) -> list[str]:
        """Return the complete lines since the last call; after a read error, a later call returns them."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._read)
                new = file.read()
        except OSError:
            return []
        whole = new[: new.rfind(b"\n") + 1]
        self._read += len(whole)
        return whole.decode("utf-8", "replace").splitlines()
