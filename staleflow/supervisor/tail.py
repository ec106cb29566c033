"""What a file of a process's output has gained, a line at a time."""

from pathlib import Path


class Tail:
    """The lines that come after this object was made. The file need not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = path.stat().st_size if path.exists() else 0

    def take(self) -> list[str]:
        """Whole lines since the last call, without their ends. What cannot be read now comes with a later one."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._read)
                new = file.read()
        except OSError:
            return []
        whole = new[: new.rfind(b"\n") + 1]
        self._read += len(whole)
        return whole.decode("utf-8", "replace").splitlines()
