"""Logging of one process: a file in the run directory, and standard error."""

import logging
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from staleflow.configs.errors import ConfigError

_PLAIN = {
    **{code: f"\\x{code:02x}" for code in (*range(9), *range(10, 32), *range(127, 160))},
    **{code: f"\\u{code:04x}" for code in (0x2028, 0x2029, 0x202A, 0x202B, 0x202D, 0x202E)},
}
"""How control characters are written."""


class _Formatter(logging.Formatter):
    converter = time.gmtime  # type: ignore[assignment]
    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"

    def formatMessage(self, record: logging.LogRecord) -> str:
        """One line, and nothing that a terminal obeys: messages hold what peers said. Tracebacks keep theirs."""
        record.message = record.message.translate(_PLAIN)
        return super().formatMessage(record)


@contextmanager
def logging_to(run_dir: Path, name: str, level: int = logging.INFO) -> Generator[None]:
    """While inside, everything logged goes to ``<run_dir>/logs/<name>.log`` (appended) and standard error."""
    path = run_dir / "logs" / f"{name}.log"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handlers: list[logging.Handler] = [logging.FileHandler(path, encoding="utf-8")]
    except OSError as error:
        raise ConfigError("run directory", run_dir, f"{path} must be writable: {error.strerror}") from None
    handlers.append(logging.StreamHandler(sys.stderr))
    formatter = _Formatter(f"%(asctime)s {name} %(levelname)s %(name)s: %(message)s")
    root = logging.getLogger()
    before = root.level
    root.setLevel(level)
    for handler in handlers:
        handler.setFormatter(formatter)
        root.addHandler(handler)
    try:
        yield
    finally:
        root.setLevel(before)
        for handler in handlers:
            root.removeHandler(handler)
            handler.close()
